-- The history of advances: up to 200 advances of a batch in one row, one partition per day (UTC).

create table tidemark.writer_numbers (
    number      integer     generated always as identity primary key,
    stream      text        not null,
    writer      text        not null,
    unique (stream, writer)
);
comment on table tidemark.writer_numbers is 'A number for each writer of a stream, which the packed history has in place of the name';

create table tidemark.packed_advances (
    time        timestamptz not null,
    part        smallint    not null,
    batch       bigint      not null,
    writers     integer[]   not null,
    epochs      bigint[]    not null,
    ids         bigint[]    not null,
    spans       bigint[]    not null,
    before      bigint[]    not null,
    ahead       bigint[],
    facts       bigint[],
    empty       bigint[],
    unseen      bigint[],
    skipped     bigint[]
) partition by range (time);
create index packed_advances_place on tidemark.packed_advances (time, part);
comment on table tidemark.packed_advances is
    'Moves of writers'' positions, many of a batch in one row; one partition per day (UTC). To read moves, use position_advances';
comment on column tidemark.packed_advances.writers is 'Numbers of writer_numbers; all arrays have one element per advance';
comment on column tidemark.packed_advances.spans is 'id - prev';
comment on column tidemark.packed_advances.before is
    'Place of the row with the previous advance of the writer: milliseconds of its time * 4096 + part; 0 for none';
comment on column tidemark.packed_advances.ahead is 'id - linear; null if all are 0, as for empty, unseen and skipped';
comment on column tidemark.packed_advances.facts is 'Numbers of facts; null if each equals the width of its advance';

create table tidemark.history_since (
    stream      text        primary key,
    since       timestamptz not null
);
comment on table tidemark.history_since is
    'The time from which the history of streams is visible; the pipeline moves it each day. Streams share rows, and rows are kept for the longest retention of any policy';
comment on column tidemark.history_since.stream is 'A pattern as in policies; * is every stream without a policy of its own';

-- Every user of this database can take any advisory lock. Only the owner of the tables can lock this row.
create table tidemark.history_lock (
    singleton   boolean     primary key default true check (singleton)
);
comment on table tidemark.history_lock is
    'The row is locked while days of history are created or dropped. The functions that lock it run as the owner of the table';
insert into tidemark.history_lock default values;

-- For speed, callers compare with the newest time of history_since first: rows after that time are visible in every stream.
create function tidemark.is_shown(wanted text, at timestamptz) returns boolean
    language sql stable as
$$
    select coalesce((
        select at >= since from tidemark.history_since h
        where h.stream = wanted or (h.stream like '%*' and starts_with(wanted, left(h.stream, -1)))
        order by h.stream = wanted desc, length(h.stream) desc limit 1
    ), true)
$$;

create view tidemark.position_advances as
    select n.stream, n.writer, a.epoch, a.id - a.span as prev, a.id, coalesce(a.facts, abs(a.span)) as facts,
        coalesce(a.empty, 0) as empty, coalesce(a.unseen, 0) as unseen, coalesce(a.skipped, 0) as skipped,
        a.id - coalesce(a.ahead, 0) as linear, p.batch, p.time
    from tidemark.packed_advances p
    cross join lateral unnest(
        p.writers, p.epochs, p.ids, p.spans, p.ahead, p.facts, p.empty, p.unseen, p.skipped
    ) as a (number, epoch, id, span, ahead, facts, empty, unseen, skipped)
    join tidemark.writer_numbers n using (number)
    where p.time >= (select coalesce(max(since), '-infinity') from tidemark.history_since)
        or tidemark.is_shown(n.stream, p.time);
comment on view tidemark.position_advances is
    'One row per move of a writer''s position. Give a range of time, so that other days are not read';

-- The moves of one stream, at a tenth of the cost of the view: rows without this stream are not unpacked.
create function tidemark.advances_of(
    wanted text, since timestamptz default '-infinity', until timestamptz default 'infinity'
) returns setof tidemark.position_advances
    language sql stable as
$$
    select n.stream, n.writer, a.epoch, a.id - a.span, a.id, coalesce(a.facts, abs(a.span)), coalesce(a.empty, 0),
        coalesce(a.unseen, 0), coalesce(a.skipped, 0), a.id - coalesce(a.ahead, 0), p.batch, p.time
    from tidemark.packed_advances p
    cross join lateral unnest(
        p.writers, p.epochs, p.ids, p.spans, p.ahead, p.facts, p.empty, p.unseen, p.skipped
    ) as a (number, epoch, id, span, ahead, facts, empty, unseen, skipped)
    join tidemark.writer_numbers n using (number)
    where n.stream = wanted and p.time between advances_of.since and until
        and p.writers && array(select number from tidemark.writer_numbers w where w.stream = wanted)
        and (p.time >= (select coalesce(max(h.since), '-infinity') from tidemark.history_since h)
            or tidemark.is_shown(wanted, p.time))
    order by 12, 2
$$;

-- Creates the partition of a day if it does not exist. CREATE TABLE ... PARTITION OF would block readers of the history;
-- attaching a finished table does not. If the partition exists, takes no lock. SECURITY DEFINER: members of tidemark_owner create and drop days without owning the table.
create function tidemark.make_history_day(day date) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as
$$
declare
    part constant text := 'packed_advances_' || to_char(day, 'YYYYMMDD');
begin
    if to_regclass('tidemark.' || part) is not null then
        return;
    end if;
    perform from tidemark.history_lock for update;
    if to_regclass('tidemark.' || part) is null then
        execute format('create table tidemark.%I (like tidemark.packed_advances including all)', part);
        execute format(
            'alter table tidemark.packed_advances attach partition tidemark.%I for values from (%L) to (%L)',
            part, day::timestamp at time zone 'UTC', (day + 1)::timestamp at time zone 'UTC');
    end if;
end
$$;

-- Drops the attached partitions of days before `day`, and returns their names. The lock timeout is short: batches would
-- wait behind this function while it waits for a reader.
create function tidemark.drop_history_before(day date) returns setof text
    language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as
$$
declare
    part text;
begin
    perform from tidemark.history_lock for update;
    for part in
        select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
        where i.inhparent = 'tidemark.packed_advances'::regclass and right(c.relname, 8) < to_char(day, 'YYYYMMDD')
        order by 1
    loop
        execute format('drop table tidemark.%I', part);
        return next part;
    end loop;
end
$$;
