-- What the pipeline writes in a batch's one transaction (docs/design.md 5 and 6). IDs are signed; times are the
-- batch's.

create table tidemark.streams (
    stream      text        primary key,
    linear      bigint      not null,
    head        bigint      not null,
    direction   smallint    not null check (direction in (-1, 0, 1)),
    shard       integer     not null,
    state       bytea       not null,
    updated_at  timestamptz not null
);
comment on table tidemark.streams is 'Linear position and encoded state of each stream';
comment on column tidemark.streams.head is 'The highest ID that any record of the stream named';

create table tidemark.stream_positions (
    stream      text        not null,
    writer      text        not null,
    epoch       bigint      not null,
    position    bigint      not null,
    retired     boolean     not null,
    forgotten   boolean     not null default false,
    updated_at  timestamptz not null,
    primary key (stream, writer)
);
comment on column tidemark.stream_positions.forgotten is
    'Retired long ago: left the state and Redis; a rejoin starts from here';

create table tidemark.position_advances (
    stream      text        not null,
    writer      text        not null,
    epoch       bigint      not null,
    prev        bigint      not null,
    id          bigint      not null,
    facts       bigint      not null,
    empty       bigint      not null,
    unseen      bigint      not null,
    skipped     bigint      not null,
    linear      bigint      not null,
    batch       bigint      not null,
    time        timestamptz not null,
    check (abs(id) > abs(prev))
) partition by range (time);
create index position_advances_chain on tidemark.position_advances (stream, writer, abs(id));
create index position_advances_time on tidemark.position_advances (stream, time);
comment on table tidemark.position_advances is 'One row per move of a writer''s position; one partition per day (UTC)';

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
comment on table tidemark.skips is 'Audit of every operator''s act that moved a position without the writer''s evidence';

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

create table tidemark.kafka_offsets (
    topic       text        not null,
    partition   integer     not null,
    next        bigint      not null,
    primary key (topic, partition)
);
comment on column tidemark.kafka_offsets.next is 'The first offset that is not yet counted into the states';

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
    expires_at  timestamptz not null
);
create unique index query_lease_one_row on tidemark.query_lease ((true));
insert into tidemark.query_lease values (0, '', now(), '-infinity');

-- Attaching a finished table takes a lock that readers of the history do not notice; CREATE ... PARTITION OF does not.
-- SECURITY DEFINER: members of tidemark_owner make and drop partitions without owning the table.
create function tidemark.make_history_day(day date) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as
$$
declare
    part text := 'position_advances_' || to_char(day, 'YYYYMMDD');
begin
    perform pg_advisory_xact_lock(hashtextextended('tidemark.history', 0));
    if to_regclass('tidemark.' || part) is null then
        execute format('create table tidemark.%I (like tidemark.position_advances including all)', part);
        execute format(
            'alter table tidemark.position_advances attach partition tidemark.%I for values from (%L) to (%L)',
            part, day::timestamp at time zone 'UTC', (day + 1)::timestamp at time zone 'UTC');
    end if;
end
$$;

create function tidemark.drop_history_before(day date) returns setof text
    language plpgsql security definer set search_path = pg_catalog, pg_temp as
$$
declare
    part text;
begin
    perform pg_advisory_xact_lock(hashtextextended('tidemark.history', 0));
    for part in
        select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'tidemark.position_advances'::regclass
          and c.relname < 'position_advances_' || to_char(day, 'YYYYMMDD')
        order by 1
    loop
        execute format('drop table tidemark.%I', part);
        return next part;
    end loop;
end
$$;
