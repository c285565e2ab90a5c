-- The tables that the pipeline writes: positions, gaps, audit and progress, in one transaction for each batch
-- (docs/design.md 6); and the status of the pipeline and its sinks. IDs are signed. A time is the time of the batch unless
-- its column has a default.

-- The fill factor leaves half of a page free. Each batch rewrites these rows; the new version of a row then fits into the
-- page of the old version, and no index is written.
create table tidemark.streams (
    stream      text        primary key,
    linear      bigint      not null,
    head        bigint      not null,
    direction   smallint    not null check (direction in (-1, 0, 1)),
    shard       integer     not null,
    state       bytea       not null,
    updated_at  timestamptz not null,
    retired     bytea
) with (fillfactor = 45);
comment on table tidemark.streams is 'Linear position and encoded state of each stream';
comment on column tidemark.streams.head is 'The highest ID that any record of the stream has named';
comment on column tidemark.streams.retired is
    'Encoded table of the retired writers, which replaces the last byte of state; null: state is complete. A separate column, because the table may have 500 kB and rarely changes';

create table tidemark.stream_positions (
    stream      text        not null,
    writer      text        not null,
    epoch       bigint      not null,
    position    bigint      not null,
    retired     boolean     not null,
    forgotten   boolean     not null default false,
    updated_at  timestamptz not null,
    advanced    bigint      not null default 0,
    primary key (stream, writer)
) with (fillfactor = 45);
comment on column tidemark.stream_positions.forgotten is
    'Retired long ago, and removed from the state and from Redis. If the writer joins again, it starts from this position';
comment on column tidemark.stream_positions.advanced is
    'Place of the row with the newest advance in packed_advances, as in packed_advances.before; 0 for none';

create table tidemark.stream_gaps (
    stream      text        not null,
    writer      text        not null,
    epoch       bigint      not null,
    low         bigint      not null,
    top         bigint      not null,
    opened_at   timestamptz not null,
    closed_at   timestamptz,
    closed_by   text
);
create unique index stream_gaps_open on tidemark.stream_gaps (stream, writer, top) where closed_at is null;
create index stream_gaps_closed on tidemark.stream_gaps (closed_at) where closed_at is not null;

create table tidemark.skips (
    number      bigint      generated always as identity primary key,
    stream      text        not null,
    writer      text        not null,
    epoch       bigint      not null,
    kind        text        not null,
    prev        bigint      not null,
    id          bigint      not null,
    by          text        not null,
    why         text        not null,
    batch       bigint      not null,
    time        timestamptz not null
);
comment on table tidemark.skips is
    'Audit of the operator overrides that batches applied: IDs were settled without the writer''s evidence';

create table tidemark.late_completions (
    number      bigint      generated always as identity primary key,
    stream      text        not null,
    writer      text        not null,
    epoch       bigint      not null,
    prev        bigint      not null,
    id          bigint      not null,
    facts       bigint      not null,
    why         text        not null,
    batch       bigint      not null,
    time        timestamptz not null
);
create index late_completions_stream on tidemark.late_completions (stream, number);

create table tidemark.linear_moves (
    stream      text        not null,
    prev        bigint      not null,
    linear      bigint      not null,
    retired     text[]      not null,
    epochs      bigint[]    not null,
    batch       bigint      not null,
    time        timestamptz not null
);
create index linear_moves_time on tidemark.linear_moves (stream, time);
comment on table tidemark.linear_moves is
    'Moves of the linear position in batches without an advance in the stream, for example by a retirement; position_advances has the other moves';
comment on column tidemark.linear_moves.retired is 'Writers that retired in the batch; epochs has the epoch of each';

create table tidemark.dead_letters (
    reason      text        primary key,
    records     bigint      not null,
    newest_at   timestamptz not null
);
comment on table tidemark.dead_letters is
    'Number of rejected records since this database was created, by reason. Each record counts once; the topic of dead letters may have duplicates';

create table tidemark.unsent_dead_letters (
    query       text        not null,
    batch       bigint      not null,
    rejected    bytea       not null,
    primary key (query, batch)
);
comment on table tidemark.unsent_dead_letters is
    'Rejected records of a batch until their dead letters are in Kafka: a restart must not lose them (docs/design.md, rule 5)';
comment on column tidemark.unsent_dead_letters.rejected is 'Kafka offsets and reasons, without the records themselves';

create table tidemark.requeues (
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
comment on table tidemark.requeues is
    'Offset ranges of deferred records, which the pipeline produces to the facts topic again';
comment on column tidemark.requeues.next is
    'The offset to continue with. Larger than last if nothing is left to produce';
comment on column tidemark.requeues.gone is
    'Number of offsets that Kafka no longer had, or whose record was too large. The IDs of these records stay open until a JOIN settles them';

create table tidemark.kafka_offsets (
    topic       text        not null,
    partition   integer     not null,
    next        bigint      not null,
    primary key (topic, partition)
);
comment on column tidemark.kafka_offsets.next is 'The first offset whose record is not in the states';

create table tidemark.applied_batches (
    number      bigint      generated always as identity primary key,
    query       text        not null,
    batch       bigint      not null,
    offsets     jsonb       not null,
    applied_at  timestamptz not null default now(),
    unique (query, batch)
);
create index applied_batches_time on tidemark.applied_batches (applied_at);

create table tidemark.topics (
    topic       text        primary key,
    topic_id    text        not null,
    partitions  integer     not null
);

create table tidemark.pipeline (
    singleton   boolean     primary key default true check (singleton),
    shards      integer     not null
);

create table tidemark.query_lease (
    token       bigint      primary key,
    owner       text        not null,
    since       timestamptz not null,
    expires_at  timestamptz not null,
    version     text        not null default '',
    waits_for   text
);
create unique index query_lease_one_row on tidemark.query_lease ((true));
comment on column tidemark.query_lease.version is
    'Version of Tidemark that acquired the lease last; empty: no process has acquired the lease';
comment on column tidemark.query_lease.waits_for is
    'What a batch of the owner waits for in this database, if it has waited for some seconds; null otherwise';
insert into tidemark.query_lease (token, owner, since, expires_at) values (0, '', now(), '-infinity');

create table tidemark.sink_faults (
    sink        text        not null,
    stream      text        not null,
    problem     text        not null,
    since       timestamptz not null default now(),
    primary key (sink, stream)
);
comment on table tidemark.sink_faults is
    'Streams that a sink cannot publish, although it publishes other streams, and the error. For display; the pipeline retries';

create table tidemark.lagging_partitions (
    topic           text        not null,
    partition       integer     not null,
    records         bigint      not null,
    since           timestamptz not null,
    blocked_offset  bigint,
    blocked_since   timestamptz,
    primary key (topic, partition)
);
comment on table tidemark.lagging_partitions is
    'Kafka partitions that the pipeline has read with lag for ten seconds or longer, and the offset at which an open Kafka transaction blocks the partition. For display; no position depends on this table';

create table tidemark.retention_clock (
    singleton   boolean     primary key default true check (singleton),
    time        timestamptz not null
);
comment on table tidemark.retention_clock is
    'The current time that the last complete run of retention assumed. A run moves the time by at most one day, so a clock that jumps ahead deletes at most one day of history at a time';
