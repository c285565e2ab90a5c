-- The rooms of a server, in the service's own database (docs/explanation/rooms.md). Each fact of a stream is a row of
-- rooms.timeline or rooms.invalidations with its stream ID, and never changes.

create schema rooms;

create table rooms.state_groups (
    id          bigint  primary key generated always as identity,
    room        text    not null,
    base        bigint  references rooms.state_groups
);
create index state_groups_by_room on rooms.state_groups (room, id);
create index state_groups_by_base on rooms.state_groups (base);
comment on table rooms.state_groups is 'States that events share, each stored as its difference from its base';

create table rooms.state_deltas (
    state_group bigint  not null references rooms.state_groups on delete cascade,
    type        text    not null,
    state_key   text    not null,
    event       text    not null,
    depth       bigint  not null,
    primary key (state_group, type, state_key)
);

create table rooms.rooms (
    room        text    primary key,
    state_group bigint  references rooms.state_groups,
    version     bigint  not null default 0,
    turn        bigint  not null default 0
);
create index rooms_by_group on rooms.rooms (state_group);
comment on table rooms.rooms is 'A transaction that persists an event locks the row of the event''s room';
comment on column rooms.rooms.state_group is 'The group of the current state; NULL if there is no forward extremity';
comment on column rooms.rooms.turn is 'The number of times that the room''s lock was taken';
comment on column rooms.rooms.version is 'The number of changes of the current state';

create table rooms.events (
    event       text    primary key,
    room        text    not null references rooms.rooms,
    type        text    not null,
    sender      text    not null,
    prevs       text[]  not null,
    depth       bigint  not null check (depth > 0),
    state_key   text,
    content     jsonb   not null,
    held_as     text    not null,
    state_group bigint  references rooms.state_groups
);
create index events_by_group on rooms.events (state_group);

create table rooms.edges (
    room        text    not null,
    prev        text    not null,
    event       text    not null references rooms.events,
    depth       bigint  not null,
    counts      boolean not null,
    primary key (room, prev, event)
);
comment on table rooms.edges is
    'The events that name `prev` as a prev event, with their depths. The event `prev` itself may be missing';
comment on column rooms.edges.counts is 'Whether the edge removes `prev` from the forward extremities';

create table rooms.forward_extremities (
    room        text    not null,
    event       text    not null references rooms.events,
    primary key (room, event)
);
create table rooms.backward_extremities (
    room        text    not null,
    event       text    not null,
    primary key (room, event)
);

create table rooms.timeline (
    stream_ordering bigint primary key,
    event       text    not null references rooms.events,
    room        text    not null,
    depth       bigint  not null,
    writer      text    not null,
    recipient   text,
    turn        bigint  not null default 0
);
comment on table rooms.timeline is 'The facts of the streams events (1, 2, ...) and backfill (-1, -2, ...)';
comment on column rooms.timeline.recipient is
    'The only user who receives the fact, if it is an out-of-band membership or the end of a stay. NULL: all members of the room';
comment on column rooms.timeline.turn is
    'The turn of the room when the event was persisted. The order of stream IDs may differ';
create index timeline_by_arrival on rooms.timeline (room, stream_ordering) where recipient is null;
create index timeline_by_depth on rooms.timeline (room, depth, stream_ordering) where recipient is null;
create index timeline_by_recipient on rooms.timeline (recipient, stream_ordering) where recipient is not null;
create unique index timeline_by_event on rooms.timeline (event) where recipient is null;

create table rooms.memberships (
    member      text    not null,
    room        text    not null references rooms.rooms,
    membership  text    not null,
    event       text    not null,
    primary key (member, room)
);
create index memberships_by_room on rooms.memberships (room);
comment on table rooms.memberships is 'The memberships in the current states of the rooms';

create table rooms.invalidations (
    stream_id   bigint  primary key,
    cache       text    not null,
    keys        text[],
    ms          bigint  not null,
    writer      text    not null,
    version     bigint
);
comment on table rooms.invalidations is 'The facts of the stream caches';
comment on column rooms.invalidations.keys is 'The key of the invalid value. NULL: all values of the cache are invalid';
comment on column rooms.invalidations.version is
    'The version of the room''s new state: cached values of lower versions are invalid. NULL for the cache rooms_of';

-- Who receives the events of a room: each stay of a member, by the turns of its first and last event
-- (docs/explanation/rooms.md).
create table rooms.stays (
    member      text    not null,
    room        text    not null references rooms.rooms,
    began       bigint  not null,
    ended       bigint,
    left_by     bigint  references rooms.timeline,
    primary key (member, room, began)
);
create index stays_by_end on rooms.stays (member, left_by);
create unique index stays_open on rooms.stays (room, member) where ended is null;
comment on column rooms.stays.left_by is
    'The stream ID of the fact that reports the end to the member. It is higher than the IDs of all events of the stay';

-- Tokens and caches of clients are valid in one incarnation of the database (docs/explanation/rooms.md).

create table rooms.incarnations (began bigint primary key);
comment on table rooms.incarnations is
    'The times at which the database was opened after a restore, in microseconds since 1970; 0 for the first incarnation';
insert into rooms.incarnations values (0);

-- Begins a new incarnation, and returns its number. Call it before clients connect to a database that may lack facts
-- that they have received: a restored backup, or a promoted standby that lagged. `heads` has the highest ID of
-- each stream in Tidemark: {"events": 950, ...}. `margin` must exceed the number of IDs that were given out and had not
-- reached Tidemark.
create function rooms.begin_anew(heads jsonb, margin bigint default 10000) returns bigint
language plpgsql volatile
as $$
declare
    _now constant bigint := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    _of record;
begin
    for _of in select * from tidemark.append_streams where ids is not null order by number loop
        if heads->>_of.stream is null then
            raise exception using errcode = 'invalid_parameter_value',
                message = format('`heads` has no ID for stream %L', _of.stream),
                hint = 'Run in Tidemark''s Postgres: select jsonb_object_agg(stream, head) from tidemark.streams';
        end if;
        -- Waits for transactions that have taken an ID: each locks the sequence until it ends.
        execute format('alter sequence %s no cycle', _of.ids);
        perform setval(_of.ids, _of.direction * (margin + greatest(
            abs((heads->>_of.stream)::bigint), abs(coalesce(pg_sequence_last_value(_of.ids), _of.after))
        )));
    end loop;
    insert into rooms.incarnations values (greatest(_now, (select max(began) + 1 from rooms.incarnations)));
    return (select max(began) from rooms.incarnations);
end
$$;
