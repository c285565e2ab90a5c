-- The history, packed: a row per batch and some two hundred advances in place of a row per advance. The view
-- `position_advances` shows single advances as the table of that name did, whose rows stay until their days are dropped.
-- Works with code for schema 2.

-- Behind a long reader of the history (a dump) this gives up and may be tried again: batches would wait behind it.
set local lock_timeout = '5s';

alter table tidemark.position_advances rename to unpacked_advances;
comment on table tidemark.unpacked_advances is
    'One row per move of a writer''s position, written by code for schemas before 7; one partition per day (UTC)';

create table tidemark.writer_numbers (
    number      integer     generated always as identity primary key,
    stream      text        not null,
    writer      text        not null,
    unique (stream, writer)
);
comment on table tidemark.writer_numbers is 'A short name for each writer of a stream, for the packed history';

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
    'Moves of writers'' positions, many of a batch in one row; one partition per day (UTC). To be read by position_advances';
comment on column tidemark.packed_advances.writers is 'Numbers of writer_numbers; all arrays have one element per advance';
comment on column tidemark.packed_advances.spans is 'id - prev';
comment on column tidemark.packed_advances.before is
    'Place of the row with the advance before this one: milliseconds of its time * 4096 + part; 0 for none';
comment on column tidemark.packed_advances.ahead is 'id - linear; null where all are 0, as in empty, unseen, skipped';
comment on column tidemark.packed_advances.facts is 'null where each is the width of its advance';

alter table tidemark.stream_positions add column advanced bigint not null default 0;
comment on column tidemark.stream_positions.advanced is 'Place of the row with the newest advance in packed_advances';

create view tidemark.position_advances as
    select n.stream, n.writer, a.epoch, a.id - a.span as prev, a.id, coalesce(a.facts, abs(a.span)) as facts,
        coalesce(a.empty, 0) as empty, coalesce(a.unseen, 0) as unseen, coalesce(a.skipped, 0) as skipped,
        a.id - coalesce(a.ahead, 0) as linear, p.batch, p.time
    from tidemark.packed_advances p
    cross join lateral unnest(
        p.writers, p.epochs, p.ids, p.spans, p.ahead, p.facts, p.empty, p.unseen, p.skipped
    ) as a (number, epoch, id, span, ahead, facts, empty, unseen, skipped)
    join tidemark.writer_numbers n using (number)
    union all
    select stream, writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time
    from tidemark.unpacked_advances;
comment on view tidemark.position_advances is
    'One row per move of a writer''s position. Say which time: days that it leaves out are not read';

-- Of one stream, at a tenth of the view's price: rows in which it does not occur are not unpacked.
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
    where n.stream = wanted and p.time between since and until
        and p.writers && array(select number from tidemark.writer_numbers w where w.stream = wanted)
    union all
    select stream, writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time
    from tidemark.unpacked_advances where stream = wanted and time between since and until
    order by 12, 2
$$;

-- For a pipeline of before, which goes on until it is replaced.
create function tidemark.keep_unpacked() returns trigger
    language plpgsql as
$$
begin
    insert into tidemark.unpacked_advances
        (stream, writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time)
    values (new.stream, new.writer, new.epoch, new.prev, new.id, new.facts, new.empty, new.unseen, new.skipped,
        new.linear, new.batch, new.time);
    return new;
end
$$;
create trigger keep_unpacked instead of insert on tidemark.position_advances
    for each row execute function tidemark.keep_unpacked();

create or replace function tidemark.make_history_day(day date) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as
$$
declare
    part text[];
begin
    perform pg_advisory_xact_lock(hashtextextended('tidemark.history', 0));
    foreach part slice 1 in array array[
        ['packed_advances', 'packed_advances_' || to_char(day, 'YYYYMMDD')],
        ['unpacked_advances', 'position_advances_' || to_char(day, 'YYYYMMDD')]
    ] loop
        if to_regclass('tidemark.' || part[2]) is null then
            execute format('create table tidemark.%I (like tidemark.%I including all)', part[2], part[1]);
            execute format(
                'alter table tidemark.%I attach partition tidemark.%I for values from (%L) to (%L)',
                part[1], part[2], day::timestamp at time zone 'UTC', (day + 1)::timestamp at time zone 'UTC');
        end if;
    end loop;
end
$$;

create or replace function tidemark.drop_history_before(day date) returns setof text
    language plpgsql security definer set search_path = pg_catalog, pg_temp as
$$
declare
    part text;
begin
    perform pg_advisory_xact_lock(hashtextextended('tidemark.history', 0));
    for part in
        select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
        where i.inhparent in ('tidemark.packed_advances'::regclass, 'tidemark.unpacked_advances'::regclass)
          and right(c.relname, 8) < to_char(day, 'YYYYMMDD')
        order by 1
    loop
        execute format('drop table tidemark.%I', part);
        return next part;
    end loop;
end
$$;

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, insert, update, delete on tidemark.writer_numbers, tidemark.packed_advances to tidemark_owner;
        grant select, insert on tidemark.position_advances to tidemark_owner;
        grant usage on all sequences in schema tidemark to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.writer_numbers, tidemark.packed_advances, tidemark.position_advances to tidemark_reader;
    end if;
end
$$;
