-- Rejected records of a batch, until they are in the dead letters: a lost checkpoint must not lose them
-- (docs/design.md, rule 5).
-- Works with code for schema 2.

create table tidemark.unsent_letters (
    query       text        not null,
    batch       bigint      not null,
    rejected    bytea       not null,
    primary key (query, batch)
);
comment on column tidemark.unsent_letters.rejected is 'Where they stand in Kafka, and why; not the records themselves';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, insert, update, delete on tidemark.unsent_letters to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.unsent_letters to tidemark_reader;
    end if;
end
$$;
