-- The schema with which a service appends facts in its own database and transaction, from any language (docs/design.md
-- 4b): the streams, the functions that append, and the outbox that the relay reads.

-- A database with the encoding SQL_ASCII accepts any bytes, so a row might not be valid text.
do $$
begin
    if getdatabaseencoding() = 'SQL_ASCII' then
        raise exception using errcode = 'character_not_in_repertoire',
            message = 'the encoding of this database is SQL_ASCII, so a row might not be valid text';
    end if;
end
$$;

-- Whether the name contains an invisible character. Such names are refused, because two different names may look the
-- same.
create function tidemark.has_invisible(_name text) returns boolean
language sql immutable
as $$
    select _name ~ ('[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800'
        || '\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]')
$$;

create table tidemark.append_streams (
    number      integer     primary key generated always as identity,
    -- The rules for names on Kafka (docs/design.md 3): no white space, no control characters.
    stream      text        not null unique check (
        char_length(stream) between 1 and 255
        and stream !~ '[\u0001-\u0020\u007f-\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]'
        and not tidemark.has_invisible(stream)
    ),
    ids         regclass,
    direction   smallint    not null check (direction in (-1, 1)),
    after       bigint      not null check (after * direction >= 0)
);
comment on table tidemark.append_streams is
    'Streams to which facts can be appended; tidemark.create_stream creates them';
comment on column tidemark.append_streams.ids is
    'The sequence of the stream''s IDs, which only the functions may use. NULL: the stream was dropped';
comment on column tidemark.append_streams.after is 'The stream''s IDs begin beyond this one';

-- Separate from append_streams, which every append reads: while an old snapshot exists, a row that changes often has
-- many dead versions.
create table tidemark.append_progress (
    number      integer     primary key references tidemark.append_streams on delete cascade,
    floor       bigint      not null,
    version     bigint      not null default 0,
    database    text,
    start       text,
    after       text,
    writer      text,
    server      text,
    published   bigint      not null default 0,
    written_by  xid
);
comment on table tidemark.append_progress is 'The relay''s progress with each stream';
comment on column tidemark.append_progress.floor is
    'Every ID up to the floor is decided, and Kafka has the records. Outbox rows are deleted only up to the floor, by the transaction that raises the floor';
comment on column tidemark.append_progress.version is
    'Rises when epochs begin or new writers are found. A relay that has read another version starts again';
comment on column tidemark.append_progress.database is
    'Identifies the history of this database in which the epochs began';
comment on column tidemark.append_progress.start is
    'The token of the current JOINs (timeline.start). The column `after` has the token of the previous JOINs';
comment on column tidemark.append_progress.writer is 'The name of the database''s own writer on Kafka';
comment on column tidemark.append_progress.server is
    'The start time of the server when the epochs began. After a restart new epochs begin, because the server may have an older disk';
comment on column tidemark.append_progress.published is
    'The highest floor from which the database went back (a magnitude). If an ID up to this one has no row, the ID may have had a published fact';
comment on column tidemark.append_progress.written_by is
    'The relay''s transaction that wrote this row. If it differs from xmin, a restore or a replication has written the row';

-- A new row for each value. If one row were updated again and again, every query would read its dead versions while an
-- old snapshot exists.
create table tidemark.append_sent (
    number      integer     not null,
    upto        bigint      not null,
    primary key (number, upto)
)
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
comment on table tidemark.append_sent is
    'No ID of a stream beyond the stream''s highest `upto` was ever published (magnitudes). The relay stores a row before it sends records, and deletes the row when the floor has passed `upto`';

create table tidemark.append_writers (
    number      integer     not null references tidemark.append_streams on delete cascade,
    writer      text        not null,
    epoch       bigint      not null,
    last        bigint      not null,
    state       text        not null default 'joining' check (state in ('joining', 'joined', 'retiring', 'retired')),
    primary key (number, writer)
);
comment on table tidemark.append_writers is 'The known writers of each stream: the database''s own, and the named ones';
comment on column tidemark.append_writers.last is
    'The last cut of the writer''s chain: the ID of a JOIN, a fact, a void, a common cut or the end of the epoch. Kafka has everything of the writer up to this ID';
comment on column tidemark.append_writers.state is
    'joining: until Kafka has acknowledged the JOIN. retiring: from when the floor has reached the end of the epoch, until Kafka has
acknowledged the RETIRE. A retired writer that appends again joins in a higher epoch';

create table tidemark.append_outbox (
    number      integer     not null,
    id          bigint      not null,
    rows        text[]      not null,
    bytes       integer     not null,
    reserved_by xid8,
    writer      text        not null default '',
    primary key (number, id)
)
-- Every row is deleted soon. So the number of dead rows must start autovacuum, not their share of the few live rows.
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0,
      autovacuum_analyze_threshold = 50000);
comment on table tidemark.append_outbox is 'Appended facts, reserved IDs and common cuts above the floor';
comment on column tidemark.append_outbox.rows is
    'The rows of the fact as JSON; of a common cut, the names of the writers whose epochs end at its ID';
comment on column tidemark.append_outbox.bytes is 'The approximate size of the row''s records on Kafka, in bytes';
comment on column tidemark.append_outbox.reserved_by is
    'The transaction that has reserved the ID and not completed it; otherwise NULL';
comment on column tidemark.append_outbox.writer is
    'The name of the writer; empty for the database''s own; * for a common cut, an ID at which the chain of every writer is cut';

-- Helpers of the functions below. These functions set the search path and row_security = off. With this setting, a
-- statement fails if row level security would hide rows. The functions rely on the failure, because a missing row is
-- evidence.

-- Waits for the shared lock of stream and writer. Any login may take this advisory lock. Of Tidemark's functions, only
-- tidemark.retire_writer takes the lock exclusively, for a moment. The wait ends after the caller's lock_timeout
-- (_limit), or after 5 s if the caller has none ('0'). The error names the session that has the lock.
create function tidemark.wait_for_lock(_of integer, _writer integer, _stream text, _limit text) returns void
language plpgsql volatile set lock_timeout = '5s'
as $$
declare
    _blockers text;
begin
    if _limit <> '0' then
        perform set_config('lock_timeout', _limit, true);
    end if;
    perform pg_advisory_xact_lock_shared(_of, _writer);
exception when lock_not_available then
    select string_agg(distinct case when held.pid is null then 'a prepared transaction' else
        format('pid %s (user %s, session named %s)', held.pid, activity.usename, activity.application_name) end, '; ')
    into _blockers
    from pg_locks as held left join pg_stat_activity as activity on activity.pid = held.pid
    where held.locktype = 'advisory' and held.objsubid = 2 and held.mode = 'ExclusiveLock'
        and held.classid::bigint = _of and held.objid = _writer::oid and held.pid is distinct from pg_backend_pid()
        and held.database = (select oid from pg_database where datname = current_database());
    raise exception using errcode = 'lock_not_available',
        message = format('cannot append to stream %L: the wait for an advisory lock of %s has timed out',
            _stream, coalesce(_blockers, 'a session that has ended')),
        hint = 'End that session. To keep logins from such locks, see SECURITY.md, "Locks in Postgres".';
end
$$;

-- Takes a transaction ID and the shared lock of stream and writer. Both must be taken before nextval, which locks the
-- sequence until the transaction ends. So a transaction with an undecided ID has all three, and the relay finds it in
-- pg_locks. Writers whose names have the same hash share a lock: an open transaction of one of them
-- blocks the positions of all.
create function tidemark.take_lock(_of tidemark.append_streams, _writer text) returns void
language plpgsql volatile
as $$
begin
    perform pg_current_xact_id();
    if not pg_try_advisory_xact_lock_shared(1414087749 + _of.number, hashtext(_writer)) then
        perform tidemark.wait_for_lock(
            1414087749 + _of.number, hashtext(_writer), _of.stream, current_setting('lock_timeout'));
    end if;
end
$$;

create function tidemark.take_id(_of tidemark.append_streams, _writer text) returns bigint
language plpgsql volatile
as $$
begin
    perform tidemark.take_lock(_of, _writer);
    return nextval(_of.ids);
end
$$;

-- Checks the name of a writer, and returns the name.
create function tidemark.append_writer(_writer text) returns text
language plpgsql immutable
as $$
begin
    -- The rules for names on Kafka (docs/design.md 3). Empty: the database's own writer.
    if _writer is null or char_length(_writer) > 255 or _writer = '*'
        or _writer ~ '[\u0001-\u0020\u007f-\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]'
        or tidemark.has_invisible(_writer) then
        raise exception using errcode = 'invalid_parameter_value', message = format('invalid writer name: %L', left(_writer, 256)),
            hint = 'A name has 1 to 255 characters, no white space, control or invisible characters, and is not *.';
    end if;
    return _writer;
end
$$;

-- Raises an error if no stream can have the name. The rules are the same as in append_streams.stream.
create function tidemark.check_stream_name(_stream text) returns void
language plpgsql immutable
as $$
begin
    if _stream is null or _stream = '' or char_length(_stream) > 255
        or _stream ~ '[\u0001-\u0020\u007f-\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]'
        or tidemark.has_invisible(_stream) then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('invalid stream name: %L', left(_stream, 256)),
            hint = 'A name has 1 to 255 characters, and no white space, control or invisible characters.';
    end if;
end
$$;

-- Returns the row of a stream. Raises an error if the stream does not exist or was dropped.
create function tidemark.append_stream(_stream text) returns tidemark.append_streams
language plpgsql stable
as $$
declare
    _of tidemark.append_streams;
begin
    select * into _of from tidemark.append_streams as known where known.stream = _stream and known.ids is not null;
    if not found then
        perform tidemark.check_stream_name(_stream);
        raise exception using errcode = 'undefined_object',
            message = format('stream %L does not exist', _stream),
            hint = format('Create it once, as the owner of the schema: select tidemark.create_stream(%L)', _stream);
    end if;
    return _of;
end
$$;

-- Checks the rows of a fact, and returns them as text. A row that Kafka or a reader cannot accept would block its
-- stream for ever.
create function tidemark.append_checked(_rows jsonb[]) returns text[]
language plpgsql immutable
as $$
declare
    _texts text[] := _rows::text[];
    _text text;
begin
    -- The usual case: all rows together are too short to be too long or too deep (256 levels have 512 brackets), and
    -- none is NULL.
    if array_ndims(_texts) = 1 and octet_length(array_to_string(_texts, '')) < 512
        and array_position(_texts, null) is null then
        return _texts;
    elsif _texts is null then
        raise exception using errcode = 'null_value_not_allowed', message = 'the rows are NULL';
    elsif array_ndims(_texts) > 1 then
        raise exception using errcode = 'array_subscript_error', message = 'the rows are an array of arrays',
            hint = 'Give an array of one dimension. A row that is a list is one JSON value, such as ''[1, 2]''.';
    end if;
    foreach _text in array _texts loop
        if _text is null then
            raise exception using errcode = 'null_value_not_allowed', message = 'a row is NULL',
                hint = 'For the JSON value null, give ''null''::jsonb.';
        elsif octet_length(_text) >= 512 then
            if octet_length(_text) > 900000 then
                raise exception using errcode = 'program_limit_exceeded', message =
                    format('a row has %s bytes of JSON, and the limit is 900000', octet_length(_text)),
                    hint = 'Keep only what readers need to find the fact, or split the row into several rows.';
            elsif jsonb_path_exists(_text::jsonb, 'strict $.**{255} ? (@.type() == "array" || @.type() == "object")') then
                raise exception using errcode = 'program_limit_exceeded', message =
                    'a row is nested 256 deep or deeper, which not every JSON parser accepts';
            end if;
        end if;
    end loop;
    return _texts;
end
$$;

-- The approximate size of the records of these rows, in bytes. The relay limits its memory by this size.
create function tidemark.append_bytes(_texts text[]) returns integer
language sql immutable
as $$ select 200 * cardinality(_texts) + octet_length(array_to_string(_texts, '')) $$;

-- Checks the size of a fact, and returns the size. The size is limited, because the relay has a whole fact in memory.
create function tidemark.fact_bytes(_stream text, _texts text[]) returns integer
language plpgsql immutable
as $$
declare
    _bytes integer := tidemark.append_bytes(_texts);
begin
    -- 16 MiB, in the units of tidemark.append_bytes.
    if _bytes > 16777216 then
        raise exception using errcode = 'program_limit_exceeded',
            message = format('a fact of stream %L has %s bytes in %s rows, and a fact may have 16777216 (200 for each row,'
                ' and its JSON)', _stream, _bytes, cardinality(_texts)),
            hint = 'Split the fact into several facts, or keep in the rows only what readers need to find the fact.';
    end if;
    return _bytes;
end
$$;

-- Appends a fact. The function has few expressions, because each expression costs every transaction of a service a
-- microsecond.
create function tidemark.append_fact(_writer text, _stream text, _rows jsonb[]) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _texts text[] := tidemark.append_checked(_rows);
    _bytes integer := tidemark.append_bytes(_texts);
    _number integer;
    _ids regclass;
    _id bigint;
begin
    if _bytes > 16777216 then
        perform tidemark.fact_bytes(_stream, _texts);
    end if;
    if _writer is distinct from '' then
        perform tidemark.append_writer(_writer);
    end if;
    select known.number, known.ids into _number, _ids
    from tidemark.append_streams as known where known.stream = _stream and known.ids is not null;
    if not found then
        select made.number, made.ids into _number, _ids from tidemark.append_stream(_stream) as made;
    end if;
    -- The statements of tidemark.take_id.
    perform pg_current_xact_id();
    if not pg_try_advisory_xact_lock_shared(1414087749 + _number, hashtext(_writer)) then
        perform tidemark.wait_for_lock(
            1414087749 + _number, hashtext(_writer), _stream, current_setting('lock_timeout'));
    end if;
    _id := nextval(_ids);
    insert into tidemark.append_outbox (number, id, rows, bytes, writer)
    values (_number, _id, _texts, _bytes, _writer);
    return _id;
end
$$;

-- Postgres can inline this function and the next one into the statement that calls it.
create function tidemark.append(stream text, variadic rows jsonb[] default '{}') returns bigint
language sql volatile return tidemark.append_fact('', stream, rows);
comment on function tidemark.append is
    'Appends a fact with these rows to the stream, and returns its stream ID. The fact is published only if this transaction commits';

create function tidemark.append_as(writer text, stream text, variadic rows jsonb[] default '{}') returns bigint
language sql volatile return tidemark.append_fact(writer, stream, rows);
comment on function tidemark.append_as is 'Does the same as tidemark.append, for a named writer with its own position';

create function tidemark.append_many(stream text, rows jsonb[], writer text default '') returns bigint[]
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _of tidemark.append_streams := tidemark.append_stream(append_many.stream);
    _writer text := tidemark.append_writer(append_many.writer);
    _texts text[] := tidemark.append_checked(append_many.rows);
    _ids bigint[];
begin
    perform tidemark.take_lock(_of, _writer);
    with made as (
        insert into tidemark.append_outbox (number, id, rows, bytes, writer)
        select _of.number, nextval(_of.ids), array[given.text], 200 + octet_length(given.text), _writer
        from unnest(_texts) as given (text)
        returning id
    )
    select coalesce(array_agg(made.id), '{}') into _ids from made;
    return _ids;
end
$$;
comment on function tidemark.append_many is
    'Appends one fact for each row, and returns their stream IDs in the order of the rows';

create function tidemark.reserve(stream text, writer text default '') returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _of tidemark.append_streams := tidemark.append_stream(reserve.stream);
    _writer text := tidemark.append_writer(reserve.writer);
    _id bigint := tidemark.take_id(_of, _writer);
begin
    -- If a savepoint is rolled back, Postgres removes this row and releases the lock. `complete` finds the writer in
    -- the row.
    insert into tidemark.append_outbox (number, id, rows, bytes, reserved_by, writer)
    values (_of.number, _id, '{}', 0, pg_current_xact_id(), _writer);
    return _id;
end
$$;
comment on function tidemark.reserve is
    'Reserves and returns the next stream ID, for tidemark.complete in the same transaction. Without tidemark.complete the ID gets no fact';

create function tidemark.complete(stream text, id bigint, variadic rows jsonb[] default '{}') returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _of tidemark.append_streams := tidemark.append_stream(complete.stream);
    _texts text[] := tidemark.append_checked(complete.rows);
    _bytes integer := tidemark.fact_bytes(complete.stream, _texts);
begin
    update tidemark.append_outbox as kept
    set rows = _texts, bytes = _bytes, reserved_by = null
    where kept.number = _of.number and kept.id = complete.id and kept.reserved_by = pg_current_xact_id();
    if not found then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('this transaction has not reserved ID %s of stream %L, or has completed it',
                complete.id, complete.stream),
            hint = 'Reserve and complete the ID in one transaction. A rolled back savepoint gives up the IDs reserved in it.';
    end if;
end
$$;
comment on function tidemark.complete is
    'Appends a fact with these rows at the reserved ID. The fact is published only if this transaction commits';

create function tidemark.create_stream(stream text, direction text default 'forward', after bigint default 0) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _sign integer := case create_stream.direction when 'forward' then 1 when 'backward' then -1 end;
    _sequence text;
    _known tidemark.append_streams;
    _last bigint;
begin
    perform tidemark.check_stream_name(create_stream.stream);
    if _sign is null or create_stream.after is null or create_stream.after * _sign < 0 then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'the direction must be forward, with `after` at least 0, or backward, with `after` at most 0';
    end if;
    insert into tidemark.append_streams (stream, direction, after)
    values (create_stream.stream, _sign, create_stream.after)
    on conflict on constraint append_streams_stream_key do nothing;
    select * into _known from tidemark.append_streams as made where made.stream = create_stream.stream for no key update;
    if _known.direction <> _sign then
        raise exception using errcode = 'duplicate_object',
            message = format('stream %L exists already, in the other direction', create_stream.stream);
    elsif _known.ids is not null then
        -- pg_sequence_last_value locks the sequence until the transaction ends, so the usual case does without it.
        if abs(create_stream.after) > abs(_known.after) then
            _last := coalesce(pg_sequence_last_value(_known.ids), _known.after);
            if abs(create_stream.after) > abs(_last) then
                raise exception using errcode = 'invalid_parameter_value',
                    message = format('stream %L exists already, with IDs beyond %s and the last ID %s: `after` must not be'
                        ' beyond the last ID, and is %s',
                        _known.stream, _known.after, _last, create_stream.after),
                    hint = 'To keep the stream as it is, leave `after` out. Only a new stream can begin beyond an ID.';
            end if;
        end if;
        return;
    elsif abs(create_stream.after) > abs(_known.after) then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('stream %L was dropped at ID %s and must continue there: `after` must not be beyond this ID',
                _known.stream, _known.after);
    end if;
    _sequence := format('tidemark.append_ids_%s', _known.number);
    execute format('create sequence %s as bigint increment by %s start with %s cache 1 no cycle',
        _sequence, _sign, _known.after + _sign);
    execute format('revoke all on sequence %s from public', _sequence);
    if to_regrole('tidemark_relay') is not null then
        execute format('grant select on sequence %s to tidemark_relay', _sequence);
    end if;
    update tidemark.append_streams as made set ids = _sequence::regclass where made.number = _known.number;
    -- If the stream was dropped, the database's writer has retired, and joins again. A relay that has not noticed the
    -- drop starts again because of the new version.
    insert into tidemark.append_progress as kept (number, floor) values (_known.number, _known.after)
    on conflict (number) do update set version = kept.version + 1;
    update tidemark.append_writers as known
    set epoch = greatest(known.epoch + 1, (extract(epoch from clock_timestamp()) * 1000)::bigint), state = 'joining'
    from tidemark.append_progress as progress
    where progress.number = _known.number and (known.number, known.writer) = (progress.number, progress.writer);
end
$$;
comment on function tidemark.create_stream is
    'Creates the stream if it does not exist. Its IDs begin beyond `after`, which may be the last ID of a table that has rows. Fails if the stream exists and `after` is beyond its last ID';

-- A transaction that has taken an ID locks the sequence until it ends, even if a savepoint gave up the lock of the
-- writer. The rows about the stream stay, so that no ID and no epoch is given out twice.
create function tidemark.drop_stream(stream text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '1s' set row_security = off
as $$
declare
    _of tidemark.append_streams := tidemark.append_stream(drop_stream.stream);
    _head bigint;
    _blockers text;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'feature_not_supported',
            message = 'tidemark.drop_stream needs a READ COMMITTED transaction';
    end if;
    select string_agg(distinct coalesce('pid ' || held.pid, 'a prepared transaction'), ', ') into _blockers
    from pg_locks as held
    where held.locktype = 'advisory' and held.objsubid = 2 and held.granted and held.pid is distinct from pg_backend_pid()
        and held.classid::bigint = 1414087749 + _of.number
        and held.database = (select oid from pg_database where datname = current_database());
    if _blockers is null then
        begin
            execute format('alter sequence %s no cycle', _of.ids);
        exception when lock_not_available then
            select string_agg(distinct coalesce('pid ' || held.pid, 'a prepared transaction'), ', ') into _blockers
            from pg_locks as held
            where held.locktype = 'relation' and held.relation = _of.ids and held.granted
                and held.database = (select oid from pg_database where datname = current_database());
            _blockers := coalesce(_blockers, 'one that has ended since');
        end;
    end if;
    if _blockers is not null then
        raise exception using errcode = 'object_in_use',
            message = format('stream %L has open transactions: %s', drop_stream.stream, _blockers),
            hint = 'Run `tidemark relay blockers` for details.';
    end if;
    _head := coalesce(pg_sequence_last_value(_of.ids), _of.after);
    if exists (
        select from tidemark.append_progress as progress where progress.number = _of.number and progress.floor <> _head
        union all
        select from tidemark.append_writers as known where known.number = _of.number and known.state = 'joining'
        union all
        select from tidemark.append_outbox as kept where kept.number = _of.number
    ) then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('stream %L has IDs that the relay has not published yet', drop_stream.stream);
    end if;
    update tidemark.append_streams as dropped set ids = null, after = _head where dropped.number = _of.number;
    update tidemark.append_writers as known set state = 'retiring', last = _head
    where known.number = _of.number and known.state = 'joined';
    execute format('drop sequence %s', _of.ids);
    return _head;
end
$$;
comment on function tidemark.drop_stream is
    'Drops the stream, and retires its writers. Returns its last ID: a stream that is created again continues beyond this ID';

-- Takes an ID at which the chain of every writer is cut, so that the positions of idle writers move. The relay calls
-- this function for a stream with several writers. Returns NULL if another session has the lock: the relay must not
-- wait, because it also serves other streams.
create function tidemark.append_beat(stream text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _of tidemark.append_streams := tidemark.append_stream(append_beat.stream);
    _id bigint;
begin
    perform pg_current_xact_id();
    if not pg_try_advisory_xact_lock_shared(1414087749 + _of.number, hashtext('*')) then
        return null;
    end if;
    _id := nextval(_of.ids);
    insert into tidemark.append_outbox (number, id, rows, bytes, writer)
    values (_of.number, _id, '{}', tidemark.append_bytes('{}'), '*');
    return _id;
end
$$;

-- Waits until a sequence has given out another ID than its `last` (a magnitude), a stream is added, or `most` seconds
-- have passed. The process that updates the positions for readers calls this procedure. It queries the sequences every
-- `pause` seconds. Each query has its own transaction, because a query locks the sequences until the transaction ends.
-- The procedure has no SET clause, because a SET clause would forbid COMMIT.
create procedure tidemark.await_ids(numbers integer[], last bigint[], pause double precision, most double precision)
language plpgsql
as $$
declare
    _end constant timestamptz := clock_timestamp() + make_interval(secs => most);
begin
    loop
        perform pg_sleep(pause);
        exit when clock_timestamp() >= _end;
        begin
            exit when exists (
                select from tidemark.append_streams as known
                left join unnest(numbers, last) as seen (number, id) on seen.number = known.number
                left join pg_sequence on seqrelid = ids
                where ids is not null and (
                    seen.number is null
                    or case when seqcache is not null then abs(pg_sequence_last_value(ids)) end is distinct from seen.id
                )
            );
        exception when internal_error or undefined_table then  -- a sequence was dropped meanwhile
            exit;
        end;
        commit;
    end loop;
end
$$;

-- Ends the writer's epoch at the returned ID: every transaction with an ID of the writer has ended, Kafka has all facts
-- of the writer, and no fact of the writer can follow below this ID. Does not wait for the lock, because appends of the
-- writer would queue behind the wait.
create function tidemark.retire_writer(writer text, stream text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _of tidemark.append_streams := tidemark.append_stream(retire_writer.stream);
    _known tidemark.append_writers;
    _blockers text;
    _id bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'feature_not_supported',
            message = 'tidemark.retire_writer needs a READ COMMITTED transaction',
            hint = 'With another isolation level it may not see facts that were committed before it got the lock.';
    end if;
    select * into _known from tidemark.append_writers as known
    where known.number = _of.number and known.writer = retire_writer.writer and known.state in ('joining', 'joined');
    if not found then
        perform tidemark.append_writer(retire_writer.writer);
        raise exception using errcode = 'undefined_object',
            message = format('stream %L has no writer %L', retire_writer.stream, retire_writer.writer),
            hint = 'The writer has retired, has never appended, or the relay has not read its first fact yet.';
    elsif _known.writer = (select progress.writer from tidemark.append_progress as progress where progress.number = _of.number) then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%L is the database itself: appends without a writer name are published under this name',
                retire_writer.writer);
    end if;
    perform pg_current_xact_id();
    if not pg_try_advisory_xact_lock(1414087749 + _of.number, hashtext(_known.writer)) then
        select string_agg(coalesce('pid ' || held.pid, 'a prepared transaction'), ', ') into _blockers
        from pg_locks as held
        where held.locktype = 'advisory' and held.objsubid = 2 and held.granted
            and held.classid::bigint = 1414087749 + _of.number and held.objid = hashtext(_known.writer)::oid
            and held.database = (select oid from pg_database where datname = current_database());
        raise exception using errcode = 'object_in_use',
            message = format('writer %L of stream %L has an open transaction: %s',
                _known.writer, retire_writer.stream, coalesce(_blockers, 'one that has ended since')),
            hint = 'Run `tidemark relay blockers` for details.';
    elsif exists (
        select from tidemark.append_outbox as kept where kept.number = _of.number and kept.writer = _known.writer
    ) then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('facts of writer %L of stream %L wait for the relay, or for open IDs below them',
                _known.writer, retire_writer.stream);
    end if;
    _id := nextval(_of.ids);
    insert into tidemark.append_outbox (number, id, rows, bytes, writer)
    values (_of.number, _id, array[_known.writer], tidemark.append_bytes('{}'), '*');
    return _id;
end
$$;
comment on function tidemark.retire_writer is
    'Retires the writer, and returns the ID at which it retires. After the relay has published the retirement, the writer blocks no position. A retired writer that appends again joins again';

revoke all on function
    tidemark.wait_for_lock(integer, integer, text, text), tidemark.take_lock(tidemark.append_streams, text), tidemark.take_id(tidemark.append_streams, text),
    tidemark.has_invisible(text), tidemark.append_writer(text), tidemark.check_stream_name(text), tidemark.append_stream(text),
    tidemark.append_checked(jsonb[]), tidemark.fact_bytes(text, text[]),
    tidemark.append_bytes(text[]), tidemark.append_fact(text, text, jsonb[]), tidemark.append_beat(text),
    tidemark.append(text, jsonb[]), tidemark.append_as(text, text, jsonb[]), tidemark.append_many(text, jsonb[], text),
    tidemark.reserve(text, text), tidemark.complete(text, bigint, jsonb[]), tidemark.create_stream(text, text, bigint),
    tidemark.drop_stream(text), tidemark.retire_writer(text, text)
from public;
revoke all on procedure tidemark.await_ids(integer[], bigint[], double precision, double precision) from public;

-- Two roles without login, to grant to users. A user who may not create roles can still migrate. Then an administrator
-- must create the roles before the migration, if they are needed.
do $$
begin
    create role tidemark_append nologin;
exception when insufficient_privilege or duplicate_object or unique_violation then
    null;
end
$$;

do $$
begin
    create role tidemark_relay nologin;
exception when insufficient_privilege or duplicate_object or unique_violation then
    null;
end
$$;

do $$
begin
    if to_regrole('tidemark_append') is not null then
        grant usage on schema tidemark to tidemark_append;
        grant execute on function
            tidemark.append_fact(text, text, jsonb[]), tidemark.append(text, jsonb[]),
            tidemark.append_as(text, text, jsonb[]), tidemark.append_many(text, jsonb[], text), tidemark.reserve(text, text),
            tidemark.complete(text, bigint, jsonb[])
        to tidemark_append;
    end if;
    if to_regrole('tidemark_relay') is not null then
        grant usage on schema tidemark to tidemark_relay;
        grant select on tidemark.append_streams, tidemark.relay_schema_version to tidemark_relay;
        grant select, update on tidemark.append_progress to tidemark_relay;
        grant select, insert, update on tidemark.append_writers to tidemark_relay;
        grant select, insert, delete on tidemark.append_sent to tidemark_relay;
        grant execute on function tidemark.append_beat(text), tidemark.retire_writer(text, text) to tidemark_relay;
        grant execute on procedure tidemark.await_ids(integer[], bigint[], double precision, double precision) to tidemark_relay;
        grant select, delete on tidemark.append_outbox to tidemark_relay;
    end if;
end
$$;
