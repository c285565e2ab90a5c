-- The state of `tidemark synapse` (docs/how-to/synapse.md). It is in Tidemark's own database, never in Synapse's.

create table tidemark.synapse_streams (
    stream      text        primary key,
    database    text        not null,
    history     text        not null,
    lsn         pg_lsn      not null,
    start       text        not null,
    after       text,
    floor       bigint      not null,
    server      text,
    facts_since bigint,
    head        bigint
);
comment on table tidemark.synapse_streams is
    'Streams of Synapse that a bridge publishes, and the history of its database';
comment on column tidemark.synapse_streams.history is
    'The name of the database in JOINs (timeline.database). The name also changes if the same database goes back';
comment on column tidemark.synapse_streams.lsn is
    'The end of the write-ahead log when facts were last sent. If the log is shorter now, an older disk was restored';
comment on column tidemark.synapse_streams.floor is
    'The ID at which the stream''s writers first joined (a magnitude). Facts up to this ID were not published';
comment on column tidemark.synapse_streams.start is
    'The token of the current JOINs (timeline.start). The column `after` has the token of the previous JOINs';
comment on column tidemark.synapse_streams.server is 'The server_name of the stream''s Synapse; NULL if not known yet';
comment on column tidemark.synapse_streams.facts_since is
    'tidemark.synapse_facts has every published fact above this ID; NULL if no fact is stored yet';
comment on column tidemark.synapse_streams.head is
    'The highest ID that this history is known to have given out (a magnitude)';

create table tidemark.synapse_writers (
    stream      text        not null references tidemark.synapse_streams on delete cascade,
    writer      text        not null,
    epoch       bigint      not null,
    sent_upto   bigint      not null,
    state       text        not null default 'active' check (state in ('active', 'retiring', 'retired')),
    backlog_from bigint,
    primary key (stream, writer)
);
comment on table tidemark.synapse_writers is 'Writers of Synapse''s streams, and up to which ID each is published';
comment on column tidemark.synapse_writers.sent_upto is
    'Everything of the writer up to this ID (a magnitude) is in Kafka, or in tidemark.synapse_outbox';
comment on column tidemark.synapse_writers.backlog_from is
    'The writer''s facts beyond this ID, up to the ID at which it joined, are not published yet, and will be late. NULL if there are none';
comment on column tidemark.synapse_writers.state is
    'retiring: the writer''s epoch ends when its facts up to the last allocated ID are sent. retired: the epoch has ended at sent_upto';

-- A record is stored in the transaction that moves the position. So after a crash the next bridge sends the same bytes
-- again.
create table tidemark.synapse_outbox (
    number      bigint      primary key generated always as identity,
    stream      text        not null,
    value       bytea       not null
)
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
comment on table tidemark.synapse_outbox is
    'Records that Kafka has not acknowledged, in the order in which they are sent';

create table tidemark.synapse_facts (
    stream      text        not null references tidemark.synapse_streams on delete cascade,
    id          bigint      not null,
    marks       bytea       not null,
    is_anchor   boolean     not null,
    primary key (stream, id)
);
comment on table tidemark.synapse_facts is
    'Published facts: the newest of each stream, and about one in 500 of the older ones';
comment on column tidemark.synapse_facts.marks is 'For each row of the fact, an 8-byte hash of the row''s identity';

create table tidemark.synapse_heads (
    stream      text        not null references tidemark.synapse_streams on delete cascade,
    at          bigint      not null,
    head        bigint      not null,
    primary key (stream, at)
);
comment on table tidemark.synapse_heads is
    'IDs beyond `head` were given out after `at` (ms since 1970, clock of Synapse''s Postgres). This bounds the age of their rows';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant usage on schema tidemark to tidemark_owner;
        grant select on tidemark.synapse_schema_version to tidemark_owner;
        grant select, insert, update, delete
            on tidemark.synapse_streams, tidemark.synapse_writers, tidemark.synapse_outbox, tidemark.synapse_facts,
                tidemark.synapse_heads
            to tidemark_owner;
    end if;
    -- Readers see which streams a bridge publishes, because the remedy for a blocked stream depends on it.
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.synapse_streams to tidemark_reader;
    end if;
end
$$;
