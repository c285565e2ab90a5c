-- Positions in the database of readers, and the functions with which readers in any language read each fact once
-- (docs/design.md 6b). `tidemark relay migrate` and `tidemark follow migrate` run this file after `schema.sql`, each time:
-- tables stay, and functions are replaced.

alter table tidemark_reader.places add column if not exists timeline bigint;
comment on column tidemark_reader.places.timeline is 'Timeline of the positions when the place last moved';

create table if not exists tidemark_reader.positions (
    stream      text        primary key,
    source      text        not null check (source in ('database', 'handover', 'published')),
    linear      bigint      not null,
    vector      jsonb       not null default '{}',
    token       text        not null,
    late        bigint      not null default 0,
    late_after  bigint      not null default 0,
    timeline    bigint      not null,
    updated     timestamptz not null default clock_timestamp(),
    written_by  xid
);
comment on table tidemark_reader.positions is 'How far each stream is complete: written by the relay of this database, or by `tidemark follow`';
comment on column tidemark_reader.positions.source is
    'database: all writers append in this database, and its transactions decide the position. published: a copy of the position that Tidemark has published. handover: was database, and becomes published when the published position has reached the position here';
comment on column tidemark_reader.positions.vector is 'Writer -> ID; a writer that is not named is at linear';
comment on column tidemark_reader.positions.late is 'Number of the newest known late completion';
comment on column tidemark_reader.positions.late_after is 'Late completions up to this number are not known here';
comment on column tidemark_reader.positions.timeline is 'Begin of the timeline (microseconds since 1970). Within a timeline no position goes back';
comment on column tidemark_reader.positions.written_by is
    'The transaction that wrote this row. If it differs from xmin, a restore or replication put the row there';

create table if not exists tidemark_reader.late_completions (
    stream      text        not null,
    number      bigint      not null,
    writer      text        not null,
    epoch       bigint      not null,
    prev        bigint      not null,
    id          bigint      not null,
    facts       bigint      not null,
    why         text        not null,
    primary key (stream, number)
);
comment on table tidemark_reader.late_completions is 'The newest late completions of each stream, as Tidemark has published them';

create table if not exists tidemark_reader.timelines (
    stream      text        not null,
    timeline    bigint      not null,
    back_to     bigint      not null,
    primary key (stream, timeline)
);
comment on table tidemark_reader.timelines is 'Timelines that began when IDs beyond back_to could be given out again';

create or replace function tidemark_reader.channel(stream text) returns text
language sql immutable parallel safe
return 'tidemark_' || case when octet_length(stream) <= 54 then stream else md5(stream) end;
comment on function tidemark_reader.channel is
    'The channel of the notifications about a stream: tidemark_ and the name of the stream, or the MD5 of a name longer than 54 bytes';

create or replace function tidemark_reader.clock() returns bigint
language sql volatile
return (extract(epoch from clock_timestamp()) * 1000000)::bigint;

create or replace function tidemark_reader.token(linear bigint, vector jsonb) returns text
language sql immutable parallel safe
return (
    select 'm' || linear || coalesce(string_agg(
        '~' || replace(replace(key, '%', '%25'), '~', '%7E') || '.' || value, '' order by key collate "C"), '')
    from jsonb_each_text(vector)
    where abs(value::bigint) > abs(linear)
);

-- For each writer, the farther position of two vectors; positions up to `linear` are left out. A writer that a vector does
-- not name is at the linear position of that vector.
create or replace function tidemark_reader.farther_vector(linear bigint, a_linear bigint, a jsonb, b_linear bigint, b jsonb)
returns jsonb
language sql immutable parallel safe
return (
    select coalesce(jsonb_object_agg(writer, at), '{}')
    from (
        select name.key as writer, case
            when abs(coalesce((a ->> name.key)::bigint, a_linear)) > abs(coalesce((b ->> name.key)::bigint, b_linear))
            then coalesce((a ->> name.key)::bigint, a_linear) else coalesce((b ->> name.key)::bigint, b_linear) end as at
        from (select jsonb_object_keys(a) union select jsonb_object_keys(b)) as name (key)
    ) as known
    where abs(at) > abs(linear)
);

-- Any login can fill the queue of NOTIFY. While it is full, no transaction that notifies can commit. So no notification is
-- sent if 1 % of the queue is used (82 MiB of 8 GiB): readers then wait for at most 10 s and take again.
create or replace function tidemark_reader.notify(_streams text[]) returns void
language plpgsql volatile
as $$
begin
    if cardinality(_streams) > 0 and pg_notification_queue_usage() < 0.01 then
        perform pg_notify(tidemark_reader.channel(name), '') from unnest(_streams) as name;
    end if;
end
$$;

-- Moves linear positions and vectors forward, and never back. Returns the streams that moved. A position is ignored if:
-- the source of the stream is another one (the transactions of this database decide a `database` stream, docs/design.md 6b);
-- its `timelines` entry is not the timeline of a `database` stream; or a restore has put the row of that stream there.
create or replace function tidemark_reader.publish(
    source text, streams text[], linears bigint[], vectors jsonb[] default null, timelines bigint[] default null
) returns text[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
#variable_conflict use_column
declare
    _moved text[];
begin
    with given as (
        select name, at, coalesce(publish.vectors[number::integer], '{}') as by_writer,
            coalesce(publish.timelines[number::integer], tidemark_reader.clock()) as began
        from unnest(publish.streams, publish.linears) with ordinality as each (name, at, number)
        order by name  -- in one order, so that two processes do not wait for each other
    ), moved as (
        insert into tidemark_reader.positions as known (stream, source, linear, vector, token, timeline, written_by)
        select name, publish.source, at, tidemark_reader.farther_vector(at, at, by_writer, at, '{}'),
            tidemark_reader.token(at, by_writer), began, pg_current_xact_id()::xid
        from given
        on conflict (stream) do update set
            linear = case when abs(excluded.linear) > abs(known.linear) then excluded.linear else known.linear end,
            vector = tidemark_reader.farther_vector(
                case when abs(excluded.linear) > abs(known.linear) then excluded.linear else known.linear end,
                known.linear, known.vector, excluded.linear, excluded.vector),
            token = tidemark_reader.token(
                case when abs(excluded.linear) > abs(known.linear) then excluded.linear else known.linear end,
                tidemark_reader.farther_vector(0, known.linear, known.vector, excluded.linear, excluded.vector)),
            updated = clock_timestamp(), written_by = excluded.written_by
        where known.source = excluded.source and known.linear::numeric * excluded.linear >= 0
            and not coalesce(known.source = 'database' and known.written_by <> known.xmin, false)
            and (excluded.source = 'published' or known.timeline = excluded.timeline)
            and (
                abs(excluded.linear) > abs(known.linear)
                or known.vector is distinct from tidemark_reader.farther_vector(
                    known.linear, known.linear, known.vector, excluded.linear, excluded.vector)
            )
        returning stream
    )
    select coalesce(array_agg(stream), '{}') into _moved from moved;
    perform tidemark_reader.notify(_moved);
    return _moved;
end
$$;

-- Begins a new timeline of a `database` or `handover` stream, because IDs beyond `back_to` may be given out again. Readers beyond `back_to`
-- then get an error. Returns false for other streams. `restored`: a restore has put back the tables of the relay, and
-- `back_to` is their floor. If the restore has also put back the row of positions, the stream goes on from these positions.
create or replace function tidemark_reader.went_back(
    stream text, back_to bigint, restored boolean default false
) returns boolean
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _known tidemark_reader.positions;
    _is_foreign boolean;
    _timeline bigint;
    _back_to bigint := went_back.back_to;
begin
    select * into _known from tidemark_reader.positions as known
    where known.stream = went_back.stream and known.source <> 'published' for update;
    if _known.stream is null then
        return false;
    end if;
    select known.written_by <> known.xmin into _is_foreign
    from tidemark_reader.positions as known where known.stream = went_back.stream;
    if went_back.restored and _is_foreign then
        select at::bigint into _back_to
        from jsonb_each_text(_known.vector || jsonb_build_object('', _known.linear)) as each (name, at)
        order by abs(at::bigint) desc limit 1;
    end if;
    _timeline := greatest(_known.timeline + 1, tidemark_reader.clock());
    if abs(_known.linear) > abs(_back_to) then
        _known.linear := _back_to;
        _known.vector := '{}';
    end if;
    update tidemark_reader.positions as known
    set linear = _known.linear, vector = _known.vector, token = tidemark_reader.token(_known.linear, _known.vector),
        timeline = _timeline, updated = clock_timestamp(), written_by = pg_current_xact_id()::xid
    where known.stream = went_back.stream;
    insert into tidemark_reader.timelines (stream, timeline, back_to)
    values (went_back.stream, _timeline, _back_to);
    return true;
end
$$;

-- Makes a `database` stream `published` permanently: the stream has writers elsewhere, or an operator has settled IDs that are
-- open here. `linear` and `vector`: the published positions. While these have not reached the position of this database, the
-- source is `handover`, and the position does not move: only this database can detect that a restore has taken back IDs that
-- readers have passed. Readers do not get late completions up to number `late`, because these are older. Returns the new source;
-- NULL if this database has no positions of the stream.
create or replace function tidemark_reader.share(stream text, late bigint, linear bigint, vector jsonb) returns text
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _known tidemark_reader.positions;
    _from text;
begin
    select * into _known from tidemark_reader.positions as known where known.stream = share.stream for update;
    _from := _known.source;
    if _from = 'database' then
        _known.late := share.late;
    end if;
    if _from <> 'published' then
        _known.source := case when abs(_known.linear) > abs(share.linear) or exists (
            select from jsonb_each_text(_known.vector) as each (writer, at)
            where abs(at::bigint) > abs(coalesce((share.vector ->> writer)::bigint, share.linear))
        ) then 'handover' else 'published' end;
    end if;
    if _from <> _known.source then
        update tidemark_reader.positions as known
        set source = _known.source, late = _known.late, late_after = _known.late,
            written_by = case when known.written_by = known.xmin then pg_current_xact_id()::xid else known.written_by end
        where known.stream = share.stream;
    end if;
    if _from = 'database' then
        update tidemark_reader.places as known set late = share.late
        where known.stream = share.stream and known.late < share.late;
    end if;
    return _known.source;
end
$$;

-- Stores late completions as Tidemark has published them, and keeps the newest `keep` of the stream. `after`: the caller
-- does not have the late completions up to this number.
create or replace function tidemark_reader.publish_late(
    stream text, after bigint, numbers bigint[], writers text[], epochs bigint[], prevs bigint[], ids bigint[],
    facts bigint[], whys text[], keep integer default 10000
) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
#variable_conflict use_column
declare
    _known tidemark_reader.positions;
begin
    insert into tidemark_reader.positions (stream, source, linear, token, timeline)
    values (publish_late.stream, 'published', 0, 'm0', tidemark_reader.clock())
    on conflict do nothing;
    select * into _known from tidemark_reader.positions as known where known.stream = publish_late.stream for update;
    insert into tidemark_reader.late_completions (stream, number, writer, epoch, prev, id, facts, why)
    select publish_late.stream, each.*
    from unnest(publish_late.numbers, publish_late.writers, publish_late.epochs, publish_late.prevs, publish_late.ids,
        publish_late.facts, publish_late.whys) as each (number, writer, epoch, prev, id, facts, why)
    where each.number > _known.late
    on conflict do nothing;
    with gone as (
        delete from tidemark_reader.late_completions as kept
        where kept.stream = publish_late.stream and kept.number <= (
            select listed.number from tidemark_reader.late_completions as listed
            where listed.stream = publish_late.stream order by listed.number desc offset publish_late.keep limit 1)
        returning kept.number
    )
    update tidemark_reader.positions as known
    set late = greatest(known.late, (select max(number) from unnest(publish_late.numbers) as number), publish_late.after),
        late_after = greatest(known.late_after, (select max(number) from gone),
            case when publish_late.after > known.late then publish_late.after end),
        written_by = case when known.written_by = known.xmin then pg_current_xact_id()::xid else known.written_by end
    where known.stream = publish_late.stream;
    perform tidemark_reader.notify(array[publish_late.stream]);
end
$$;

-- The positions in the snapshot of the statement that calls tidemark_reader.take. So one statement may take a range and
-- select its rows: its snapshot has every fact up to these positions.
create or replace function tidemark_reader.positions_of(_stream text) returns tidemark_reader.positions
language sql stable security definer set search_path = pg_catalog, pg_temp set row_security = off
return (select known from tidemark_reader.positions as known where known.stream = _stream);

create or replace function tidemark_reader.place_name(_reader text, _partition integer, _partitions integer) returns text
language plpgsql immutable
as $$
begin
    if _reader is null or _reader = '' then
        raise exception using errcode = 'invalid_parameter_value', message = 'a reader needs a name';
    elsif _partitions is null and _partition is null then
        return _reader;
    elsif _partitions is null or _partition is null or _partitions < 1 or _partition < 0 or _partition >= _partitions then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('there is no partition %s of %s', coalesce(_partition::text, 'NULL'), coalesce(_partitions::text, 'NULL')),
            hint = 'Partitions are numbered from 0: partition => 0, partitions => 8.';
    end if;
    return format('%s[%s/%s]', _reader, _partition, _partitions);
end
$$;

create or replace function tidemark_reader.partition_of(key text, partitions integer) returns integer
language sql immutable parallel safe
return (('x' || left(md5(coalesce(key, '')), 8))::bit(32)::bigint % partitions)::integer;
comment on function tidemark_reader.partition_of is
    'The partition of a key, from 0: the first 32 bits of the MD5 of its UTF-8, modulo the number of partitions. A NULL key counts as the empty key';

-- The magnitude of the farthest position.
create or replace function tidemark_reader.farthest(_linear bigint, _vector jsonb) returns bigint
language sql immutable
return (select max(abs(at::bigint)) from jsonb_each_text(_vector || jsonb_build_object('', _linear)) as each (name, at));

-- Dynamic SQL, because a database without a relay has no schema tidemark. A standby sees older numbers of sequences, and a
-- row that a restore or a replication put there says nothing about the sequence of this database.
create or replace function tidemark_reader.last_id(stream text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _last bigint;
begin
    if not pg_is_in_recovery() and exists (
        select from tidemark_reader.positions as known
        where known.stream = last_id.stream and known.source = 'database' and known.written_by = known.xmin
    ) then
        execute 'select pg_sequence_last_value(ids) from tidemark.append_streams where stream = $1' into _last
        using last_id.stream;
    end if;
    return _last;
end
$$;
comment on function tidemark_reader.last_id is
    'The last ID of the stream that this database has given out. NULL: not known, for example because other databases write the
stream too, or on a standby';

-- Locks the place of a reader until the transaction ends, and returns the place. Creates the place of a new reader at _since.
-- Returns NULL if another copy of the reader has the lock and _wait is false, or if a new reader begins at a token that the
-- stream has not reached.
create or replace function tidemark_reader.lock_place(
    _stream text, _reader text, _mode text, _wait boolean, _since text, _now tidemark_reader.positions
) returns tidemark_reader.places
language plpgsql volatile
as $$
declare
    _place tidemark_reader.places;
    _linear bigint;
    _positions jsonb := '{}';
    _farthest bigint;
    _timeout text := current_setting('lock_timeout');
begin
    loop
        if _wait then
            select * into _place from tidemark_reader.places as known
            where known.reader = _reader and known.stream = _stream for update;
        else
            select * into _place from tidemark_reader.places as known
            where known.reader = _reader and known.stream = _stream for update skip locked;
        end if;
        if found and _place.version > 0 then
            exit;
        elsif not found and exists (
            select from tidemark_reader.places as known where known.reader = _reader and known.stream = _stream
        ) then
            return null;
        end if;
        -- A new reader.
        if _since is null or _since = 'beginning' then
            _linear := 0;
        elsif _since = 'now' then
            _linear := _now.linear;
            _positions := _now.vector;
        else
            if _since !~ '^(m?(0|-?[1-9][0-9]{0,18}))(~[^~]+\.(0|-?[1-9][0-9]{0,18}))*$' then
                raise exception using errcode = 'invalid_parameter_value', message = format('%L is not a token', _since),
                    hint = 'A reader begins at a token such as m7~web.9, at an ID, at ''now'' or at ''beginning''.';
            end if;
            _linear := ltrim(split_part(_since, '~', 1), 'm')::bigint;
            select coalesce(jsonb_object_agg(replace(replace(parts[1], '%7E', '~'), '%25', '%'), parts[2]::bigint), '{}')
            into _positions
            from regexp_split_to_table(_since, '~') with ordinality as part (text, number),
                regexp_match(part.text, '^(.*)\.(-?[0-9]+)$') as parts
            where number > 1;
        end if;
        if _linear::numeric * _now.linear < 0 then
            raise exception using errcode = 'invalid_parameter_value',
                message = format('stream %L runs in the other direction than %L', _stream, _since);
        end if;
        _farthest := tidemark_reader.farthest(_linear, case when _mode = 'vector' then _positions else '{}' end);
        if _now.source <> 'published' and _farthest > tidemark_reader.farthest(_now.linear, _now.vector) then
            if _farthest > abs(tidemark_reader.last_id(_stream)) then
                raise exception using errcode = 'invalid_parameter_value',
                    message = format('stream %L can never reach %L: this database has given out no ID beyond %s',
                        _stream, _since, tidemark_reader.last_id(_stream)),
                    hint = 'The token belongs to another stream or database, or its transaction was lost in a failover or a restore.';
            end if;
            return null;
        end if;
        begin
            if not _wait then
                perform set_config('lock_timeout', '20ms', true);
            end if;
            insert into tidemark_reader.places as known
                (reader, stream, mode, linear, positions, late, must_read, is_settled, version, timeline)
            values (_reader, _stream, _mode, _linear, case when _mode = 'vector' then _positions else '{}' end,
                case when _linear = 0 then _now.late_after else _now.late end, '[]', true, tidemark_reader.clock(),
                _now.timeline)
            on conflict (reader, stream) do update
            set mode = excluded.mode, linear = excluded.linear, positions = excluded.positions, late = excluded.late,
                version = excluded.version, timeline = excluded.timeline
            where known.version = 0;
            perform set_config('lock_timeout', _timeout, true);
        exception when lock_not_available then
            if _wait then
                raise;
            end if;
            return null;
        end;
    end loop;
    if _place.mode <> _mode then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('reader %L of stream %L reads in %s mode, not in %s mode', _reader, _stream, _place.mode, _mode),
            hint = 'Give the reader another name.';
    end if;
    return _place;
end
$$;

create or replace function tidemark_reader.check_place(_place tidemark_reader.places, _farthest bigint) returns void
language plpgsql stable
as $$
declare
    _now tidemark_reader.positions;
    _back_to bigint;
begin
    select * into _now from tidemark_reader.positions as known where known.stream = _place.stream;
    if _now.source <> 'published' and abs(_farthest) > tidemark_reader.farthest(_now.linear, _now.vector) then
        _back_to := _now.linear;
    end if;
    select coalesce(min(past.back_to * sign(past.back_to)) * sign(_farthest), _back_to)::bigint into _back_to
    from tidemark_reader.timelines as past
    where past.stream = _place.stream and past.timeline > _place.timeline and abs(past.back_to) < abs(_farthest);
    if _back_to is not null then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('reader %L has read stream %L up to ID %s, and the stream went back to ID %s',
                _place.reader, _place.stream, _farthest, _back_to),
            detail = 'A sequence was set back, or a part of the database was restored. IDs beyond that ID may be given out again.',
            hint = format('Undo the effects of IDs beyond %s, then move the reader: select tidemark_reader.seek(%L, %L, ''m%s'')',
                _back_to, _place.stream, _place.reader, _back_to);
    end if;
end
$$;

-- The next late completions for a place, and the place after them. Only IDs that the reader has passed are returned.
-- _ids: writer -> late IDs, at most _most. A wide range is handed out in parts; late_part of the place has the progress.
-- _withdrawn: writer -> ranges (first ID, last ID) whose earlier facts were lost in a restore.
-- Late facts of a skipped range are left out if tidemark.Reader has already handed them over.
create or replace function tidemark_reader.late_of(
    inout _place tidemark_reader.places, _now tidemark_reader.positions, _most integer, out _ids jsonb, out _withdrawn jsonb
)
language plpgsql stable
as $$
declare
    _late tidemark_reader.late_completions;
    _at bigint;
    _from bigint;
    _to bigint;
    _sign integer;
    _room bigint := _most;
    _first constant bigint := _place.late;
begin
    _ids := '{}';
    _withdrawn := '{}';
    if _now.late <= _place.late then
        return;
    elsif _place.late < _now.late_after and _place.linear <> 0 then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('late completions of stream %L from number %s to %s are not listed any more, and reader %L has not read them',
                _place.stream, _place.late + 1, _now.late_after, _place.reader),
            hint = format('Handle them by hand (`tidemark late list` shows them), then: select tidemark_reader.pass_late(%L, %L)', _place.stream, _place.reader);
    end if;
    for _late in
        select * from tidemark_reader.late_completions as listed
        where listed.stream = _place.stream and listed.number > _place.late and listed.number <= _now.late
        order by listed.number
    loop
        _sign := case when _late.id < 0 then -1 else 1 end;
        _at := case when _place.mode = 'vector' then coalesce((_place.positions ->> _late.writer)::bigint, _place.linear) else _place.linear end;
        _from := _late.prev;
        if (_place.late_part ->> 0)::bigint = _late.number then
            _from := (_place.late_part ->> 1)::bigint;
        end if;
        _to := _sign * least(abs(_late.id), abs(_at));
        if _late.facts = 0 and _late.why = 'regressed' and abs(_to) > abs(_from) then
            _withdrawn := tidemark_reader.with_range(_withdrawn, _late.writer, _from, _to);
        elsif _late.facts > 0 and abs(_to) > abs(_from) then
            if _place.mode = 'linear' and _late.facts < abs(_late.id) - abs(_late.prev) and (
                select count(*) > 1 from jsonb_object_keys(_now.vector || jsonb_build_object(_late.writer, 0))
            ) then
                exit when _place.late > _first;  -- hand out the completions before it first, and raise at the next call
                raise exception using errcode = 'object_not_in_prerequisite_state',
                    message = format('%s facts of writer %L came late in (%s, %s] of stream %L, and other writers may have IDs there',
                        _late.facts, _late.writer, _late.prev, _late.id, _place.stream),
                    hint = format('%sHandle the rows of that writer in that range, then: select tidemark_reader.pass_late(%L, %L)',
                        case when _late.why = 'regressed' then 'Undo what its earlier facts did. ' end, _place.stream, _place.reader);
            end if;
            exit when _room <= 0;
            if abs(_to) - abs(_from) > _room then
                _to := _from + _sign * _room;
                _place.late_part := jsonb_build_array(_late.number, _to);
            end if;
            _ids := _ids || jsonb_build_object(_late.writer, coalesce(_ids -> _late.writer, '[]')
                || (select coalesce(jsonb_agg(missed.id), '[]') from generate_series(_from + _sign, _to, _sign) as missed (id)
                    where _late.why <> 'skipped' or not exists (
                        select from tidemark_reader.delivered as known
                        where known.reader = _place.reader and known.stream = _place.stream and known.id = missed.id
                    )));
            if _late.why = 'regressed' then
                _withdrawn := tidemark_reader.with_range(_withdrawn, _late.writer, _from, _to);
            end if;
            _room := _room - abs(_to - _from);
            exit when (_place.late_part ->> 0)::bigint = _late.number and (_place.late_part ->> 1)::bigint = _to;
        end if;
        _place.late := _late.number;
        _place.late_part := null;
        if _late.facts > 0 and abs(_late.id) > abs(_at) then
            -- For tidemark.Reader, which skips ranges that are proven to be empty.
            _place.must_read := _place.must_read || jsonb_build_array(jsonb_build_array(_late.writer, _late.prev, _late.id));
        end if;
    end loop;
end
$$;

-- Whether the place has late completions that were not handed out yet. If so, no range is taken: the range could have facts
-- of these late completions, and these facts would be handed out twice.
create or replace function tidemark_reader.has_more_late(
    _place tidemark_reader.places, _now tidemark_reader.positions
) returns boolean
language sql stable
return exists (
    select from tidemark_reader.late_completions as listed
    where listed.stream = (_place).stream and listed.number > (_place).late and listed.number <= (_now).late
);

create or replace function tidemark_reader.with_range(_ranges jsonb, _writer text, _prev bigint, _id bigint) returns jsonb
language sql immutable
return _ranges || jsonb_build_object(_writer, coalesce(_ranges -> _writer, '[]') || jsonb_build_array(
    case when _id < 0 then jsonb_build_array(_id, _prev - 1) else jsonb_build_array(_prev + 1, _id) end));

create or replace function tidemark_reader.multirange(_ranges jsonb) returns int8multirange
language sql immutable
return (
    select coalesce(range_agg(int8range((range ->> 0)::bigint, (range ->> 1)::bigint, '[]')), '{}')
    from jsonb_array_elements(_ranges) as range
);

-- Removes at most _most parked facts that an operator retries, and returns their IDs, which are then handed out again.
create or replace function tidemark_reader.unpark(_place tidemark_reader.places, _most integer) returns bigint[]
language sql volatile
begin atomic
    with retried as (
        delete from tidemark_reader.parked as known
        where known.reader = (_place).reader and known.stream = (_place).stream and known.id in (
            select waiting.id from tidemark_reader.parked as waiting
            where waiting.reader = (_place).reader and waiting.stream = (_place).stream and waiting.retry_at is not null
            order by abs(waiting.id) limit _most
        )
        returning known.id
    )
    select coalesce(array_agg(id), '{}') from retried;
end;

create or replace function tidemark_reader.save_place(_place tidemark_reader.places, _timeline bigint) returns void
language sql volatile
begin atomic
    update tidemark_reader.places as known
    set linear = (_place).linear, positions = (_place).positions, late = (_place).late, late_part = (_place).late_part,
        must_read = (
            select coalesce(jsonb_agg(range), '[]') from jsonb_array_elements((_place).must_read) as range
            where abs((range ->> 2)::bigint) > abs(coalesce(((_place).positions ->> (range ->> 0))::bigint, (_place).linear))
        ),
        is_settled = true, timeline = _timeline, updated_at = now(),
        version = greatest(known.version + 1, tidemark_reader.clock())
    where known.reader = (_place).reader and known.stream = (_place).stream;
end;

create or replace function tidemark_reader.check_take(
    _stream text, _reader text, _most integer, _now tidemark_reader.positions
) returns void
language plpgsql stable
as $$
begin
    if _most is null or _most < 1 then
        raise exception using errcode = 'invalid_parameter_value', message = 'most must be 1 or more, for example most => 1000';
    elsif _now.stream is null then
        raise exception using errcode = 'undefined_object',
            message = format('this database has no positions of stream %L', _stream),
            hint = 'Check the name of the stream, and that `tidemark relay` of this database or `tidemark follow` runs.';
    elsif (
        select count(*) from tidemark_reader.places as other
        where other.stream = _stream and other.reader <> _reader and other.version > 0
            and regexp_replace(other.reader, '\[\d+/\d+\]$', '') = regexp_replace(_reader, '\[\d+/\d+\]$', '')
            and coalesce(substring(other.reader from '/(\d+)\]$'), '') <> coalesce(substring(_reader from '/(\d+)\]$'), '')
    ) > 0 then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('reader %L of stream %L has places of another number of partitions',
                regexp_replace(_reader, '\[\d+/\d+\]$', ''), _stream),
            hint = 'Bring all partitions to one place, then: select tidemark_reader.repartition(stream, reader, partitions)';
    end if;
end
$$;

-- Whether services append to the stream in this database: its positions come as soon as the relay runs.
create or replace function tidemark_reader.is_expected(_stream text) returns boolean
language plpgsql stable
as $$
declare
    _exists boolean := false;
begin
    if to_regclass('tidemark.append_streams') is not null and has_table_privilege('tidemark.append_streams', 'select') then
        execute 'select exists (select from tidemark.append_streams where stream = $1 and ids is not null)'
        into _exists using _stream;
    end if;
    return _exists;
end
$$;

create or replace function tidemark_reader.take_range(
    _stream text, _reader text, _most integer, _wait boolean, _since text, _now tidemark_reader.positions
) returns table (low bigint, high bigint, late bigint[], withdrawn int8multirange)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _place tidemark_reader.places;
    _before tidemark_reader.places;
    _next record;
    _ids jsonb;
    _retried bigint[];
begin
    if _now.stream is null and tidemark_reader.is_expected(_stream) then
        return;
    end if;
    perform tidemark_reader.check_take(_stream, _reader, _most, _now);
    _before := tidemark_reader.lock_place(_stream, _reader, 'linear', _wait, _since, _now);
    if _before.reader is null then
        return;
    end if;
    perform tidemark_reader.check_place(_before, _before.linear);
    select * into _next from tidemark_reader.late_of(_before, _now, _most);
    _place := _next._place;
    _ids := _next._ids;
    low := _before.linear;
    high := low;
    if abs(_now.linear) > abs(low) and not tidemark_reader.has_more_late(_place, _now) then
        high := low + case when _now.linear < 0 then -1 else 1 end * least(_most, abs(_now.linear - low));
    end if;
    _place.linear := high;
    if _place is distinct from _before or _before.timeline is distinct from _now.timeline then
        perform tidemark_reader.save_place(_place, _now.timeline);
    end if;
    _retried := tidemark_reader.unpark(_before, _most);
    select coalesce(array_agg(distinct id), '{}') into late from (
        select id::bigint from jsonb_each(_ids) as each (writer, listed), jsonb_array_elements_text(listed) as id
        union all select unnest(_retried)) as passed (id);
    select tidemark_reader.multirange(coalesce(jsonb_agg(range), '[]')) into withdrawn
    from jsonb_each(_next._withdrawn) as each (writer, listed), jsonb_array_elements(listed) as range;
    if high <> low or late <> '{}' or withdrawn <> '{}' then
        return next;
    end if;
end
$$;

create or replace function tidemark_reader.take(
    stream text, reader text, most integer default 1000, wait boolean default true, since text default null,
    partition integer default null, partitions integer default null
) returns table (low bigint, high bigint, late bigint[], withdrawn int8multirange)
language sql stable
begin atomic
    select taken.low, taken.high, taken.late, taken.withdrawn
    from tidemark_reader.take_range(take.stream, tidemark_reader.place_name(take.reader, take.partition, take.partitions),
        take.most, take.wait, take.since, tidemark_reader.positions_of(take.stream)) as taken;
end;
comment on function tidemark_reader.take is
    'Returns the IDs that the reader must read next, and moves the place of the reader past them. The place is moved in the
transaction of the caller, and is locked until that transaction ends. low and high: read the IDs in (low, high], at most `most`.
late: IDs that the reader has passed before their facts came, and IDs of parked facts to retry. withdrawn: IDs whose earlier
facts were lost in a restore: undo their effects first. No row: nothing is new, or another copy of the reader holds the lock
and wait is false. since: where a new reader begins: a token, an ID, now or beginning. partition and partitions: each
partition has its own place';

create or replace function tidemark_reader.take_ranges(
    _stream text, _reader text, _most integer, _wait boolean, _since text, _now tidemark_reader.positions
) returns table (writer text, low bigint, high bigint, late bigint[], withdrawn int8multirange)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
#variable_conflict use_variable
declare
    _place tidemark_reader.places;
    _before tidemark_reader.places;
    _next record;
    _ids jsonb;
    _name text;
    _goal bigint;
    _sign integer := case when _now.linear < 0 or _now.token ~ '\.-' then -1 else 1 end;
    _moved boolean := false;
    _has_more_late boolean;
    _named text[];
    _lows bigint[] := '{}';
    _highs bigint[] := '{}';
    _retried bigint[];
begin
    if _now.stream is null and tidemark_reader.is_expected(_stream) then
        return;
    end if;
    perform tidemark_reader.check_take(_stream, _reader, _most, _now);
    _before := tidemark_reader.lock_place(_stream, _reader, 'vector', _wait, _since, _now);
    if _before.reader is null then
        return;
    end if;
    perform tidemark_reader.check_place(_before, (
        select at::bigint from jsonb_each_text(_before.positions || jsonb_build_object('', _before.linear)) as each (name, at)
        order by abs(at::bigint) desc limit 1));
    select * into _next from tidemark_reader.late_of(_before, _now, _most);
    _place := _next._place;
    _ids := _next._ids;
    _has_more_late := tidemark_reader.has_more_late(_place, _now);
    -- The last element is NULL, for all writers that are not named.
    select array_agg(name order by name) || null::text into _named from (
        select jsonb_object_keys(_before.positions) union select jsonb_object_keys(_now.vector)
        union select jsonb_object_keys(_ids || _next._withdrawn)) as known (name);
    _place.positions := '{}';
    for _index in 1 .. cardinality(_named) loop
        _name := _named[_index];
        low := coalesce((_before.positions ->> _name)::bigint, _before.linear);
        _goal := coalesce((_now.vector ->> _name)::bigint, _now.linear);
        high := low;
        if abs(_goal) > abs(low) and not _has_more_late then
            high := low + _sign * least(_most, abs(_goal - low));
        end if;
        _lows := _lows || low;
        _highs := _highs || high;
        _moved := _moved or high <> low or _ids || _next._withdrawn ? _name;
        if _name is not null then
            _place.positions := _place.positions || jsonb_build_object(_name, high);
        end if;
    end loop;
    _place.linear := _highs[cardinality(_highs)];
    select coalesce(jsonb_object_agg(name, at), '{}') into _place.positions
    from jsonb_each(_place.positions) as each (name, at) where at <> to_jsonb(_place.linear);
    if _place is distinct from _before or _before.timeline is distinct from _now.timeline then
        perform tidemark_reader.save_place(_place, _now.timeline);
    end if;
    _retried := tidemark_reader.unpark(_before, _most);
    if _moved or _retried <> '{}' then
        for _index in 1 .. cardinality(_named) loop
            writer := _named[_index];
            low := _lows[_index];
            high := _highs[_index];
            -- The writers of retried facts are not known, so each row lists all retried IDs.
            select coalesce(array_agg(distinct id), '{}') into late from (
                select id::bigint from jsonb_array_elements_text(_ids -> writer) as id
                union all select unnest(_retried)) as passed (id);
            withdrawn := tidemark_reader.multirange(_next._withdrawn -> writer);
            return next;
        end loop;
    end if;
end
$$;

create or replace function tidemark_reader.take_vector(
    stream text, reader text, most integer default 1000, wait boolean default true, since text default null
) returns table (writer text, low bigint, high bigint, late bigint[], withdrawn int8multirange)
language sql stable
begin atomic
    select taken.writer, taken.low, taken.high, taken.late, taken.withdrawn
    from tidemark_reader.take_ranges(take_vector.stream, tidemark_reader.place_name(take_vector.reader, null, null),
        take_vector.most, take_vector.wait, take_vector.since, tidemark_reader.positions_of(take_vector.stream)) as taken;
end;
comment on function tidemark_reader.take_vector is
    'Like take, with one range for each writer, up to the position of that writer: the facts of one writer do not wait for
other writers. The row whose writer is NULL is for all writers without a row in this answer';

create or replace function tidemark_reader.park(
    stream text, reader text, id bigint, reason text, partition integer default null, partitions integer default null
) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _reader constant text := tidemark_reader.place_name(park.reader, park.partition, park.partitions);
begin
    perform from tidemark_reader.places as known
    where known.stream = park.stream and known.reader = _reader and (
        abs(known.linear) >= abs(park.id)
        or exists (select from jsonb_each_text(known.positions) as each (writer, at) where abs(at::bigint) >= abs(park.id))
    );
    if not found then
        raise exception using errcode = 'undefined_object',
            message = format('stream %L has no reader %L that has taken ID %s', park.stream, _reader, park.id);
    end if;
    insert into tidemark_reader.parked (reader, stream, id, reason)
    values (_reader, park.stream, park.id, coalesce(park.reason, ''))
    on conflict on constraint parked_pkey do update set reason = excluded.reason, parked_at = now(), retry_at = null;
end
$$;
comment on function tidemark_reader.park is
    'Stores that the reader passes a fact without its effects, because processing it fails. After `tidemark readers parked
retry`, take returns the ID in late again';

create or replace function tidemark_reader.seek(stream text, reader text, token text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _mode text;
    _now tidemark_reader.positions;
    _place tidemark_reader.places;
    _between text;
begin
    select known.mode into _mode from tidemark_reader.places as known
    where known.stream = seek.stream and known.reader = seek.reader for update;
    select * into _now from tidemark_reader.positions as known where known.stream = seek.stream;
    if _mode is null or _now.stream is null then
        raise exception using errcode = 'undefined_object',
            message = format('stream %L has no reader %L in this database, or no positions', seek.stream, seek.reader);
    end if;
    delete from tidemark_reader.places as known where known.stream = seek.stream and known.reader = seek.reader;
    delete from tidemark_reader.delivered as known where known.stream = seek.stream and known.reader = seek.reader;
    _place := tidemark_reader.lock_place(seek.stream, seek.reader, _mode, true, seek.token, _now);
    if _place.reader is null then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('stream %L is at %L and has not reached %L yet', seek.stream, _now.token, seek.token),
            hint = 'Try again later.';
    end if;
    -- The writer of a parked fact is not stored. So if a parked fact is between the positions of two writers, it is not known
    -- whether the reader reads the fact again.
    select string_agg(known.id::text, ', ' order by abs(known.id)) into _between from tidemark_reader.parked as known
    where known.stream = seek.stream and known.reader = seek.reader
        and abs(known.id) > abs(_place.linear)
        and abs(known.id) <= tidemark_reader.farthest(_place.linear, _place.positions);
    if _between is not null then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('parked facts of reader %L of stream %L are beyond the linear position of %s, but not beyond its'
                ' highest position of a writer: %s', seek.reader, seek.stream, seek.token, _between),
            hint = 'Retry or drop them first (tidemark readers parked), or give a token without writers.';
    end if;
    delete from tidemark_reader.parked as known
    where known.stream = seek.stream and known.reader = seek.reader and abs(known.id) > abs(_place.linear);
end
$$;
comment on function tidemark_reader.seek is
    'Moves the place of a reader to a token, an ID, now or beginning. If the place moves back, the reader reads facts again,
parked ones too. Only for the owner of the schema';

create or replace function tidemark_reader.pass_late(stream text, reader text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _number bigint;
begin
    update tidemark_reader.places as known
    set late = case when known.late < positions.late_after then positions.late_after else coalesce((
            select min(listed.number) from tidemark_reader.late_completions as listed
            where listed.stream = known.stream and listed.number > known.late), known.late) end,
        late_part = null, version = greatest(known.version + 1, tidemark_reader.clock())
    from tidemark_reader.positions as positions
    where known.stream = pass_late.stream and known.reader = pass_late.reader and positions.stream = known.stream
    returning known.late into _number;
    return _number;
end
$$;
comment on function tidemark_reader.pass_late is
    'Skips late completions that an operator has handled by hand: all that are not listed any more, or else the first one
that the reader has not read. Returns the number up to which the reader has read or skipped them. Only for the owner of the schema';

create or replace function tidemark_reader.repartition(stream text, reader text, partitions integer) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _place tidemark_reader.places;
    _count integer;
begin
    perform from tidemark_reader.places as known
    where known.stream = repartition.stream and regexp_replace(known.reader, '\[\d+/\d+\]$', '') = repartition.reader
    order by known.reader for update;
    select count(distinct (known.linear, known.late, known.late_part)) into _count from tidemark_reader.places as known
    where known.stream = repartition.stream and regexp_replace(known.reader, '\[\d+/\d+\]$', '') = repartition.reader;
    if _count <> 1 or repartition.partitions < 1 then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = case
                when _count = 0 then format('stream %L has no reader %L', repartition.stream, repartition.reader)
                when _count = 1 then 'the number of partitions must be 1 or more'
                else format('the partitions of reader %L of stream %L are at %s different places', repartition.reader,
                    repartition.stream, _count) end,
            hint = case when _count > 1 then 'Let all partitions reach one place (see tidemark_reader.places), stop the'
                ' readers, and call the function again.' else 'Correct the arguments.' end;
    end if;
    select * into _place from tidemark_reader.places as known
    where known.stream = repartition.stream and regexp_replace(known.reader, '\[\d+/\d+\]$', '') = repartition.reader limit 1;
    delete from tidemark_reader.places as known
    where known.stream = repartition.stream and regexp_replace(known.reader, '\[\d+/\d+\]$', '') = repartition.reader;
    for _index in 0 .. repartition.partitions - 1 loop
        _place.reader := tidemark_reader.place_name(repartition.reader, _index, repartition.partitions);
        insert into tidemark_reader.places select (_place).*;
    end loop;
end
$$;
comment on function tidemark_reader.repartition is
    'Changes the number of partitions of a reader whose partitions are all at one place. Only for the owner of the schema';

revoke all on all functions in schema tidemark_reader from public;

-- A role without login, to be granted. A user who may not create roles can still migrate.
do $$
begin
    create role tidemark_take nologin;
exception when insufficient_privilege or duplicate_object or unique_violation then
    null;
end
$$;

do $$
begin
    if to_regrole('tidemark_take') is not null then
        grant usage on schema tidemark_reader to tidemark_take;
        grant execute on function
            tidemark_reader.take(text, text, integer, boolean, text, integer, integer),
            tidemark_reader.take_vector(text, text, integer, boolean, text),
            tidemark_reader.take_range(text, text, integer, boolean, text, tidemark_reader.positions),
            tidemark_reader.take_ranges(text, text, integer, boolean, text, tidemark_reader.positions),
            tidemark_reader.park(text, text, bigint, text, integer, integer),
            tidemark_reader.place_name(text, integer, integer), tidemark_reader.positions_of(text),
            tidemark_reader.partition_of(text, integer), tidemark_reader.channel(text), tidemark_reader.last_id(text)
        to tidemark_take;
    end if;
    if to_regrole('tidemark_relay') is not null then
        grant usage on schema tidemark_reader to tidemark_relay;
        grant select on tidemark_reader.positions, tidemark_reader.late_completions, tidemark_reader.places,
            tidemark_reader.parked to tidemark_relay;
        grant execute on function
            tidemark_reader.publish(text, text[], bigint[], jsonb[], bigint[]), tidemark_reader.went_back(text, bigint, boolean), tidemark_reader.share(text, bigint, bigint, jsonb),
            tidemark_reader.publish_late(text, bigint, bigint[], text[], bigint[], bigint[], bigint[], bigint[], text[], integer)
        to tidemark_relay;
    end if;
end
$$;
