-- How many records were rejected, counted in the transaction of their batch: exact where Kafka's copies may be doubled.
-- Works with code for schema 2.

create table tidemark.dead_letters (
    reason      text        primary key,
    records     bigint      not null,
    newest_at   timestamptz not null
);
comment on table tidemark.dead_letters is 'Records sent to the dead letters since this database was made, by reason';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, insert, update, delete on tidemark.dead_letters to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.dead_letters to tidemark_reader;
    end if;
end
$$;
