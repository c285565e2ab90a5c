-- What a service needs in its own database to say in any language, inside its transaction, that a fact happened
-- (docs/design.md 4b): streams, the functions that append, and the table from which the relay reads.

-- In SQL_ASCII nobody knows which characters the bytes of a row are.
do $$
begin
    if getdatabaseencoding() = 'SQL_ASCII' then
        raise exception using errcode = 'character_not_in_repertoire',
            message = 'the encoding of this database is SQL_ASCII, in which rows may be no text';
    end if;
end
$$;

-- Two names that look the same cannot be distinguished by people.
create function tidemark.has_invisible(_name text) returns boolean
language sql immutable
as $$
    select _name ~ ('[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800'
        || '\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]')
$$;

create table tidemark.append_streams (
    number      integer     primary key generated always as identity,
    -- As on Kafka (docs/design.md 3): no white space, no control characters.
    stream      text        not null unique check (
        char_length(stream) between 1 and 255
        and stream !~ '[\u0001-\u0020\u007f-\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]'
        and not tidemark.has_invisible(stream)
    ),
    ids         regclass,
    direction   smallint    not null check (direction in (-1, 1)),
    after       bigint      not null check (after * direction >= 0)
);
comment on table tidemark.append_streams is 'Streams that tidemark.append knows; made by tidemark.create_stream';
comment on column tidemark.append_streams.ids is 'The sequence of its IDs, from which only the functions take. None: the stream was dropped';
comment on column tidemark.append_streams.after is 'Its IDs begin behind this one';

-- A table of its own, because every append reads the one above: rows that change often grow versions while a snapshot is old.
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
comment on table tidemark.append_progress is 'How far the relay is with each stream';
comment on column tidemark.append_progress.floor is
    'Every ID up to it is decided and in Kafka. Rows go only below it, with the transaction that raises it';
comment on column tidemark.append_progress.version is 'Rises when epochs begin and writers are found: a relay that has read another version reads everything again';
comment on column tidemark.append_progress.database is 'The history of this database in which the epochs began';
comment on column tidemark.append_progress.start is 'The token of this history''s JOINs, which follows that of the one before';
comment on column tidemark.append_progress.writer is 'The name under which Tidemark knows this database';
comment on column tidemark.append_progress.server is
    'When the server began on which the epochs began: on another one, which may have an older disk, others begin';
comment on column tidemark.append_progress.published is
    'The highest floor that was left when the database went back (a magnitude): up to here an ID without a row may have had a published fact';
comment on column tidemark.append_progress.written_by is
    'The transaction of the relay that wrote this row. Another one has put the row there if it differs from xmin: a restore, or replication';

-- A row for each time: one that is changed for ever would leave its old versions where everybody has to pass them while
-- a snapshot is old.
create table tidemark.append_sent (
    number      integer     not null,
    upto        bigint      not null,
    primary key (number, upto)
)
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
comment on table tidemark.append_sent is
    'Nothing beyond the highest of them was ever published (magnitudes). A row is stored before records are sent, and deleted with the rows below the floor';

create table tidemark.append_writers (
    number      integer     not null references tidemark.append_streams on delete cascade,
    writer      text        not null,
    epoch       bigint      not null,
    last        bigint      not null,
    state       text        not null default 'joining' check (state in ('joining', 'joined', 'retiring', 'retired')),
    primary key (number, writer)
);
comment on table tidemark.append_writers is 'Writers that Tidemark knows of a stream: the database, and each that has a name of its own';
comment on column tidemark.append_writers.last is
    'Where its chain was last cut: at the JOIN, a fact, a void, a beat or its end. All of it up to here is in Kafka';
comment on column tidemark.append_writers.state is
    'Joining until Kafka has acknowledged the JOIN of the epoch; retiring since the floor has passed its end, until Kafka has
the RETIRE. A writer that is retired and appends again joins in a higher epoch';

create table tidemark.append_outbox (
    number      integer     not null,
    id          bigint      not null,
    rows        text[]      not null,
    bytes       integer     not null,
    reserved_by xid8,
    writer      text        not null default '',
    primary key (number, id)
)
-- Every row is deleted soon: what counts is how many are dead, not their share of the few that live.
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0,
      autovacuum_analyze_threshold = 50000);
comment on table tidemark.append_outbox is 'Facts that are appended and lie above the floor';
comment on column tidemark.append_outbox.rows is 'JSON; of a beat the names of writers that end there';
comment on column tidemark.append_outbox.bytes is 'About what its records take';
comment on column tidemark.append_outbox.reserved_by is 'The transaction that has reserved the ID and not completed it';
comment on column tidemark.append_outbox.writer is
    'Whose fact it is: empty for the database itself; * is a beat, an ID at which the chain of every writer is cut';

-- The next ones are for the functions behind them, whose search path they have. Those have row_security = off: row level
-- security that is forced on a table is an error, and never just no rows, because the functions rely on rows that are not
-- there.

-- Any login may take the lock of stream and writer. Of Tidemark only tidemark.retire_writer takes it exclusively, for a
-- moment. So a wait is bounded, by the caller's lock_timeout (_limit) if there is one, and the error names the session.
create function tidemark.wait_for_lock(_of integer, _writer integer, _stream text, _limit text) returns void
language plpgsql volatile set lock_timeout = '5s'
as $$
declare
    _holders text;
begin
    if _limit <> '0' then
        perform set_config('lock_timeout', _limit, true);
    end if;
    perform pg_advisory_xact_lock_shared(_of, _writer);
exception when lock_not_available then
    select string_agg(distinct case when held.pid is null then 'a prepared transaction' else
        format('pid %s (user %s, session named %s)', held.pid, activity.usename, activity.application_name) end, '; ')
    into _holders
    from pg_locks as held left join pg_stat_activity as activity on activity.pid = held.pid
    where held.locktype = 'advisory' and held.objsubid = 2 and held.mode = 'ExclusiveLock'
        and held.classid::bigint = _of and held.objid = _writer::oid and held.pid is distinct from pg_backend_pid()
        and held.database = (select oid from pg_database where datname = current_database());
    raise exception using errcode = 'lock_not_available',
        message = format('appending to stream %L waits for an advisory lock of %s',
            _stream, coalesce(_holders, 'a session that has ended')),
        hint = 'End that session. To keep logins from such locks, see SECURITY.md, "Locks in Postgres".';
end
$$;

-- Whoever may hold an ID that is not decided holds the lock of stream and writer, shared, has an ID of its transaction,
-- and holds the sequence: the first two are taken before the ID. The relay looks who holds them. Writers with one hash
-- share a lock, and then wait for each other.
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

create function tidemark.append_writer(_writer text) returns text
language plpgsql immutable
as $$
begin
    -- As on Kafka (docs/design.md 3); empty is the database itself.
    if _writer is null or char_length(_writer) > 255 or _writer = '*'
        or _writer ~ '[\u0001-\u0020\u007f-\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]'
        or tidemark.has_invisible(_writer) then
        raise exception using errcode = 'invalid_parameter_value', message = format('no name of a writer: %L', _writer),
            hint = 'It has 1 to 255 characters, no white space, no control characters, no invisible ones, and is not *.';
    end if;
    return _writer;
end
$$;

create function tidemark.append_stream(_stream text) returns tidemark.append_streams
language plpgsql stable
as $$
declare
    _of tidemark.append_streams;
begin
    select * into _of from tidemark.append_streams as known where known.stream = _stream and known.ids is not null;
    if not found then
        raise exception using errcode = 'undefined_object',
            message = format('tidemark knows no stream %L', _stream),
            hint = format('Make it, once, as the owner of the schema: select tidemark.create_stream(%L)', _stream);
    end if;
    return _of;
end
$$;

-- What Kafka or a reader could not take would be a fact that cannot be told, and holds its stream for ever.
create function tidemark.append_checked(_rows jsonb[]) returns text[]
language plpgsql immutable
as $$
declare
    _texts text[] := _rows::text[];
    _text text;
begin
    -- Nearly always: no row is long or deep, and none is NULL.
    if array_ndims(_texts) = 1 and octet_length(array_to_string(_texts, '')) <= 512
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
                hint = 'The JSON value is ''null''::jsonb.';
        elsif octet_length(_text) > 512 then
            if octet_length(_text) > 900000 then
                raise exception using errcode = 'program_limit_exceeded', message =
                    format('a row has %s bytes of JSON, and Kafka takes 900000', octet_length(_text)),
                    hint = 'Leave in the row what readers need to find the fact, or give it in several rows.';
            elsif jsonb_path_exists(_text::jsonb, '$.**{256}') then
                raise exception using errcode = 'program_limit_exceeded', message =
                    'a row is nested 256 deep or deeper, which not every reader of JSON takes';
            end if;
        end if;
    end loop;
    return _texts;
end
$$;

-- About what their records take, so that the relay can bound its memory.
create function tidemark.append_bytes(_texts text[]) returns integer
language sql immutable
as $$ select 200 * cardinality(_texts) + octet_length(array_to_string(_texts, '')) $$;

-- A fact has a bound, as each of its rows has: the relay sends a fact as a whole, within bounded memory.
create function tidemark.fact_bytes(_stream text, _texts text[]) returns integer
language plpgsql immutable
as $$
declare
    _bytes integer := tidemark.append_bytes(_texts);
begin
    -- 16 MiB, counted as tidemark.append_bytes does.
    if _bytes > 16777216 then
        raise exception using errcode = 'program_limit_exceeded',
            message = format('a fact of stream %L has %s bytes in %s rows, and a fact may have 16777216 (200 for each row,'
                ' and its JSON)', _stream, _bytes, cardinality(_texts)),
            hint = 'Give it in several facts, or leave in the rows what readers need to find them.';
    end if;
    return _bytes;
end
$$;

-- One call and few expressions, of which each costs every transaction of a service a microsecond.
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
    -- As tidemark.take_id.
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

-- This and the next become part of the statement that they stand in.
create function tidemark.append(stream text, variadic rows jsonb[] default '{}') returns bigint
language sql volatile return tidemark.append_fact('', stream, rows);
comment on function tidemark.append is
    'A fact of the stream with these rows happened if this transaction commits; gives its stream ID';

create function tidemark.append_as(writer text, stream text, variadic rows jsonb[] default '{}') returns bigint
language sql volatile return tidemark.append_fact(writer, stream, rows);
comment on function tidemark.append_as is 'The same as a writer that has a position of its own';

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
comment on function tidemark.append_many is 'Many facts of one row each; gives their stream IDs in the order of the rows';

create function tidemark.reserve(stream text, writer text default '') returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _of tidemark.append_streams := tidemark.append_stream(reserve.stream);
    _writer text := tidemark.append_writer(reserve.writer);
    _id bigint := tidemark.take_id(_of, _writer);
begin
    -- Goes with a savepoint that is rolled back, as the lock does; and tells `complete` whose the ID is.
    insert into tidemark.append_outbox (number, id, rows, bytes, reserved_by, writer)
    values (_of.number, _id, '{}', 0, pg_current_xact_id(), _writer);
    return _id;
end
$$;
comment on function tidemark.reserve is
    'The next stream ID, for tidemark.complete in the same transaction; without that it is an ID without a fact';

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
            hint = 'Reserve and complete belong into one transaction, and a savepoint that is rolled back takes the ID.';
    end if;
end
$$;
comment on function tidemark.complete is 'A fact with these rows has the reserved ID, if this transaction commits';

create function tidemark.create_stream(stream text, direction text default 'forward', after bigint default 0) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _sign integer := case create_stream.direction when 'forward' then 1 when 'backward' then -1 end;
    _sequence text;
    _known tidemark.append_streams;
begin
    if _sign is null or create_stream.after is null or create_stream.after * _sign < 0 then
        raise exception using errcode = 'invalid_parameter_value',
            message = 'a stream goes forward, after 0 or more, or backward, after 0 or less';
    end if;
    insert into tidemark.append_streams (stream, direction, after)
    values (create_stream.stream, _sign, create_stream.after)
    on conflict on constraint append_streams_stream_key do nothing;
    select * into _known from tidemark.append_streams as made where made.stream = create_stream.stream for no key update;
    if _known.direction <> _sign then
        raise exception using errcode = 'duplicate_object',
            message = format('stream %L is there and goes in the other direction', create_stream.stream);
    elsif _known.ids is not null then
        return;
    elsif abs(create_stream.after) > abs(_known.after) then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('stream %L was dropped at ID %s: made again it goes on behind it', _known.stream, _known.after);
    end if;
    _sequence := format('tidemark.append_ids_%s', _known.number);
    execute format('create sequence %s as bigint increment by %s start with %s cache 1 no cycle',
        _sequence, _sign, _known.after + _sign);
    execute format('revoke all on sequence %s from public', _sequence);
    if to_regrole('tidemark_relay') is not null then
        execute format('grant select on sequence %s to tidemark_relay', _sequence);
    end if;
    update tidemark.append_streams as made set ids = _sequence::regclass where made.number = _known.number;
    -- Where it was dropped the database has retired there, and joins again: a relay that has not looked since begins anew.
    insert into tidemark.append_progress as kept (number, floor) values (_known.number, _known.after)
    on conflict (number) do update set version = kept.version + 1;
    update tidemark.append_writers as known
    set epoch = greatest(known.epoch + 1, (extract(epoch from clock_timestamp()) * 1000)::bigint), state = 'joining'
    from tidemark.append_progress as told
    where told.number = _known.number and (known.number, known.writer) = (told.number, told.writer);
end
$$;
comment on function tidemark.create_stream is
    'Makes the stream unless it is there. With `after` its IDs begin behind that one, as of a table that has rows';

-- Whoever has taken an ID holds the sequence until its transaction ends, also where a savepoint gave up the lock of the
-- writer. What is known of the stream stays, so that no ID is given out twice and no epoch comes again.
create function tidemark.drop_stream(stream text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set lock_timeout = '1s' set row_security = off
as $$
declare
    _of tidemark.append_streams := tidemark.append_stream(drop_stream.stream);
    _head bigint;
    _holders text;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'feature_not_supported',
            message = 'a stream is dropped in a transaction that is READ COMMITTED';
    end if;
    select string_agg(distinct coalesce('pid ' || held.pid, 'a prepared transaction'), ', ') into _holders
    from pg_locks as held
    where held.locktype = 'advisory' and held.objsubid = 2 and held.granted and held.pid is distinct from pg_backend_pid()
        and held.classid::bigint = 1414087749 + _of.number
        and held.database = (select oid from pg_database where datname = current_database());
    if _holders is null then
        begin
            execute format('alter sequence %s no cycle', _of.ids);
        exception when lock_not_available then
            select string_agg(distinct coalesce('pid ' || held.pid, 'a prepared transaction'), ', ') into _holders
            from pg_locks as held
            where held.locktype = 'relation' and held.relation = _of.ids and held.granted
                and held.database = (select oid from pg_database where datname = current_database());
            _holders := coalesce(_holders, 'the last has ended just now');
        end;
    end if;
    if _holders is not null then
        raise exception using errcode = 'object_in_use',
            message = format('stream %L has open transactions: %s', drop_stream.stream, _holders),
            hint = '`tidemark relay blockers` says more of them.';
    end if;
    _head := coalesce(pg_sequence_last_value(_of.ids), _of.after);
    if exists (
        select from tidemark.append_progress as told where told.number = _of.number and told.floor <> _head
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
    'Nothing is appended to the stream any more; its writers retire. Made again, its IDs go on behind the one that this gives';

-- For the relay: where a stream has several writers, the lines of those who are idle end here. NULL if another session
-- holds the lock: the relay must not wait, because it serves other streams too.
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

-- For the process that keeps the positions: returns when a sequence gives out another ID than its `last` (a magnitude),
-- when a stream was added, and after `most` seconds. A query of a sequence locks it until its transaction ends, so each
-- query has a transaction of its own. No SET clause: it would forbid COMMIT.
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

-- The writer's epoch ends at the ID that this gives: whoever held an ID in its name has ended, all its facts are in Kafka,
-- and none can come below. It waits for nobody, because whoever appends in that name would wait behind it.
create function tidemark.retire_writer(writer text, stream text) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set row_security = off
as $$
declare
    _of tidemark.append_streams := tidemark.append_stream(retire_writer.stream);
    _known tidemark.append_writers;
    _holders text;
    _id bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'feature_not_supported',
            message = 'a writer retires in a transaction that is READ COMMITTED',
            hint = 'Another one does not see what was committed while it waited.';
    end if;
    select * into _known from tidemark.append_writers as known
    where known.number = _of.number and known.writer = retire_writer.writer and known.state in ('joining', 'joined');
    if not found then
        raise exception using errcode = 'undefined_object',
            message = format('stream %L has no writer %L', retire_writer.stream, retire_writer.writer),
            hint = 'It is retired, or has not appended, or the relay has not read the outbox since.';
    elsif _known.writer = (select told.writer from tidemark.append_progress as told where told.number = _of.number) then
        raise exception using errcode = 'invalid_parameter_value',
            message = format('%L is the database itself, in whose name every append without a writer is published', retire_writer.writer);
    end if;
    perform pg_current_xact_id();
    if not pg_try_advisory_xact_lock(1414087749 + _of.number, hashtext(_known.writer)) then
        select string_agg(coalesce('pid ' || held.pid, 'a prepared transaction'), ', ') into _holders
        from pg_locks as held
        where held.locktype = 'advisory' and held.objsubid = 2 and held.granted
            and held.classid::bigint = 1414087749 + _of.number and held.objid = hashtext(_known.writer)::oid
            and held.database = (select oid from pg_database where datname = current_database());
        raise exception using errcode = 'object_in_use',
            message = format('writer %L of stream %L has an open transaction: %s',
                _known.writer, retire_writer.stream, coalesce(_holders, 'it has ended just now')),
            hint = '`tidemark relay blockers` says more of it.';
    elsif exists (
        select from tidemark.append_outbox as kept where kept.number = _of.number and kept.writer = _known.writer
    ) then
        raise exception using errcode = 'object_not_in_prerequisite_state',
            message = format('facts of writer %L of stream %L wait for the relay, or for what is open below them',
                _known.writer, retire_writer.stream);
    end if;
    _id := nextval(_of.ids);
    insert into tidemark.append_outbox (number, id, rows, bytes, writer)
    values (_of.number, _id, array[_known.writer], tidemark.append_bytes('{}'), '*');
    return _id;
end
$$;
comment on function tidemark.retire_writer is
    'The writer no longer holds positions back, once the relay has published its end. If it appends again it joins again';

revoke all on function
    tidemark.wait_for_lock(integer, integer, text, text), tidemark.take_lock(tidemark.append_streams, text), tidemark.take_id(tidemark.append_streams, text),
    tidemark.has_invisible(text), tidemark.append_writer(text), tidemark.append_stream(text),
    tidemark.append_checked(jsonb[]), tidemark.fact_bytes(text, text[]),
    tidemark.append_bytes(text[]), tidemark.append_fact(text, text, jsonb[]), tidemark.append_beat(text),
    tidemark.append(text, jsonb[]), tidemark.append_as(text, text, jsonb[]), tidemark.append_many(text, jsonb[], text),
    tidemark.reserve(text, text), tidemark.complete(text, bigint, jsonb[]), tidemark.create_stream(text, text, bigint),
    tidemark.drop_stream(text), tidemark.retire_writer(text, text)
from public;
revoke all on procedure tidemark.await_ids(integer[], bigint[], double precision, double precision) from public;

-- Two roles without login, to be granted. A user who may not create roles can still migrate: an administrator makes them
-- beforehand, or nobody needs them.
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
