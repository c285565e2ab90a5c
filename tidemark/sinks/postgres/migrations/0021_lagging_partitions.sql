-- Kafka partitions whose records wait for longer than a healthy pipeline takes, for people: no position is decided by it.
-- Works with code for schema 19.

create table tidemark.lagging_partitions (
    topic           text        not null,
    partition       integer     not null,
    records         bigint      not null,
    since           timestamptz not null,
    blocked_offset  bigint,
    blocked_since   timestamptz,
    primary key (topic, partition)
);
comment on table tidemark.lagging_partitions is 'Kafka partitions whose records wait, and the offset from which an open transaction blocks them';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, insert, update, delete on tidemark.lagging_partitions to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.lagging_partitions to tidemark_reader;
    end if;
end
$$;
