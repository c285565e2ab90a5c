-- What `tidemark synapse` remembers of what it said (docs/how-to/synapse.md). It lies in Tidemark's own database, never in Synapse's.

create table tidemark.synapse_streams (
    stream      text        primary key,
    database    text        not null,
    history     text        not null,
    place       pg_lsn      not null,
    start       text        not null,
    after       text,
    floor       bigint      not null
);
comment on table tidemark.synapse_streams is 'Streams of Synapse that were told, and the history of its database in which';
comment on column tidemark.synapse_streams.history is 'What JOINs call it: another one too where the same database has gone back';
comment on column tidemark.synapse_streams.place is
    'The end of its server''s log when it was told last: one that is shorter is of a disk that was put back';
comment on column tidemark.synapse_streams.floor is 'Where its writers joined first (a magnitude): what lies below was never announced';
comment on column tidemark.synapse_streams.start is 'The token of this history''s JOINs, which follows that of the one before';

create table tidemark.synapse_writers (
    stream      text        not null references tidemark.synapse_streams on delete cascade,
    writer      text        not null,
    epoch       bigint      not null,
    told        bigint      not null,
    primary key (stream, writer)
);
comment on table tidemark.synapse_writers is 'Writers of Synapse''s streams as they were told';
comment on column tidemark.synapse_writers.told is
    'How far it was told (a magnitude): in Kafka, or waiting for it in tidemark.synapse_outbox';

-- Written with what it moves, in one transaction: whoever comes after sends the same bytes again, and goes on behind them.
create table tidemark.synapse_outbox (
    number      bigint      primary key generated always as identity,
    stream      text        not null,
    value       bytea       not null
)
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
comment on table tidemark.synapse_outbox is 'Records that Kafka has not acknowledged, in their order';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant usage on schema tidemark to tidemark_owner;
        grant select on tidemark.synapse_schema_version to tidemark_owner;
        grant select, insert, update, delete
            on tidemark.synapse_streams, tidemark.synapse_writers, tidemark.synapse_outbox to tidemark_owner;
    end if;
end
$$;
