-- Retention of single streams is exact for advances too: streams share rows, which are kept as long as the longest policy
-- says, and what is past the time of its own stream is not shown.
-- Works with code for schema 2.

create table tidemark.history_since (
    stream      text        primary key,
    since       timestamptz not null
);
comment on table tidemark.history_since is 'From when on the history of streams is shown; the pipeline moves it on each day';
comment on column tidemark.history_since.stream is 'As in policies; * is all that have no policy of their own';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, insert, update, delete on tidemark.history_since to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.history_since to tidemark_reader;
    end if;
end
$$;

-- What is younger than any of the times is shown without asking whose it is.
create function tidemark.is_shown(wanted text, at timestamptz) returns boolean
    language sql stable as
$$
    select coalesce((
        select at >= since from tidemark.history_since h
        where h.stream = wanted or (h.stream like '%*' and starts_with(wanted, left(h.stream, -1)))
        order by h.stream = wanted desc, length(h.stream) desc limit 1
    ), true)
$$;

create or replace view tidemark.position_advances as
    select n.stream, n.writer, a.epoch, a.id - a.span as prev, a.id, coalesce(a.facts, abs(a.span)) as facts,
        coalesce(a.empty, 0) as empty, coalesce(a.unseen, 0) as unseen, coalesce(a.skipped, 0) as skipped,
        a.id - coalesce(a.ahead, 0) as linear, p.batch, p.time
    from tidemark.packed_advances p
    cross join lateral unnest(
        p.writers, p.epochs, p.ids, p.spans, p.ahead, p.facts, p.empty, p.unseen, p.skipped
    ) as a (number, epoch, id, span, ahead, facts, empty, unseen, skipped)
    join tidemark.writer_numbers n using (number)
    where p.time >= (select coalesce(max(since), '-infinity') from tidemark.history_since)
        or tidemark.is_shown(n.stream, p.time)
    union all
    select stream, writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time
    from tidemark.unpacked_advances
    where time >= (select coalesce(max(since), '-infinity') from tidemark.history_since)
        or tidemark.is_shown(stream, time);

create or replace function tidemark.advances_of(
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
    union all
    select stream, writer, epoch, prev, id, facts, empty, unseen, skipped, linear, batch, time
    from tidemark.unpacked_advances where stream = wanted and time between advances_of.since and until
        and (time >= (select coalesce(max(h.since), '-infinity') from tidemark.history_since h)
            or tidemark.is_shown(wanted, time))
    order by 12, 2
$$;
