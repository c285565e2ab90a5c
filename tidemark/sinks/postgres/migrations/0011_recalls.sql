-- Where edges stand in Kafka that were put off for want of room on their chain, and that are to be produced again.
-- Works with code for schema 2.

create table tidemark.recalls (
    number      bigint      generated always as identity primary key,
    stream      text        not null,
    writer      text        not null,
    epoch       bigint      not null,
    partition   int         not null,
    next        bigint      not null,
    last        bigint      not null,
    gone        bigint      not null default 0,
    problem     text,
    since       timestamptz not null default now()
);
comment on table tidemark.recalls is 'Records of a writer that were put off, and are to be produced to the facts topic again';
comment on column tidemark.recalls.next is 'The offset to go on with; beyond last: all were produced but for those that are gone';
comment on column tidemark.recalls.gone is 'How many offsets could not be read any more: what is open waits for a JOIN';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, insert, update, delete on tidemark.recalls to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.recalls to tidemark_reader;
    end if;
end
$$;
