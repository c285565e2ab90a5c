-- What `tidemark synapse` remembers of what it said (docs/how-to/synapse.md). It lies in Tidemark's own database, never in Synapse's.

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
comment on table tidemark.synapse_streams is 'Streams of Synapse that a bridge publishes, and the history of its database';
comment on column tidemark.synapse_streams.history is 'What JOINs call it: another one too where the same database has gone back';
comment on column tidemark.synapse_streams.lsn is
    'The end of the write-ahead log when facts were last sent. If the log is shorter now, an older disk was put back';
comment on column tidemark.synapse_streams.floor is 'Where its writers joined first (a magnitude): what lies below was never announced';
comment on column tidemark.synapse_streams.start is 'The token of this history''s JOINs, which follows that of the one before';
comment on column tidemark.synapse_streams.server is 'The server_name of its Synapse; null: nobody has looked since this was asked';
comment on column tidemark.synapse_streams.facts_since is
    'tidemark.synapse_facts has every published fact above this ID; null: none is remembered yet';
comment on column tidemark.synapse_streams.head is 'The highest ID that was seen to be given out in this history (a magnitude)';

create table tidemark.synapse_writers (
    stream      text        not null references tidemark.synapse_streams on delete cascade,
    writer      text        not null,
    epoch       bigint      not null,
    sent_upto   bigint      not null,
    state       text        not null default 'active' check (state in ('active', 'retiring', 'retired')),
    backlog_from bigint,
    primary key (stream, writer)
);
comment on table tidemark.synapse_writers is 'Writers of Synapse''s streams, and up to where each was sent';
comment on column tidemark.synapse_writers.sent_upto is
    'Everything of the writer up to here (a magnitude) is in Kafka, or in tidemark.synapse_outbox';
comment on column tidemark.synapse_writers.backlog_from is
    'Its facts from here to where it joined are still to be sent, as late facts: other writers had been sent further';
comment on column tidemark.synapse_writers.state is
    'retiring: its facts up to the last allocated ID are sent, then its epoch ends; retired: its epoch has ended at sent_upto';

-- Written with what it moves, in one transaction: whoever comes after sends the same bytes again, and goes on behind them.
create table tidemark.synapse_outbox (
    number      bigint      primary key generated always as identity,
    stream      text        not null,
    value       bytea       not null
)
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
comment on table tidemark.synapse_outbox is 'Records that Kafka has not acknowledged, in their order';

create table tidemark.synapse_facts (
    stream      text        not null references tidemark.synapse_streams on delete cascade,
    id          bigint      not null,
    marks       bytea       not null,
    is_anchor   boolean     not null,
    primary key (stream, id)
);
comment on table tidemark.synapse_facts is 'Facts that were published: the newest of each stream, and of the older ones one of 500';
comment on column tidemark.synapse_facts.marks is 'A hash of 8 bytes of each of its rows';

create table tidemark.synapse_heads (
    stream      text        not null references tidemark.synapse_streams on delete cascade,
    at          bigint      not null,
    head        bigint      not null,
    primary key (stream, at)
);
comment on table tidemark.synapse_heads is
    'IDs beyond the head were given out after that moment (ms since 1970, clock of Synapse''s server): their rows were not deleted for age yet';

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
    -- People who look at what is blocked see which streams a bridge publishes, and so which remedy there is.
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.synapse_streams to tidemark_reader;
    end if;
end
$$;
