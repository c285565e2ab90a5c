-- What a service needs in its own database to write streams (docs/design.md 4): who writes, the outbox, and the fence.

create table tidemark.writers (
    instance    text        primary key,
    epoch       bigint      not null check (epoch > 0),
    started_at  timestamptz not null default now()
);
comment on table tidemark.writers is 'The living epoch of each writer; raised at each start and each fence';

create table tidemark.writer_streams (
    instance    text        not null references tidemark.writers,
    stream      text        not null,
    sequence    oid         not null,
    direction   smallint    not null check (direction in (-1, 1)),
    primary key (instance, stream)
);
comment on table tidemark.writer_streams is 'What a fence must join again for a dead writer';

create table tidemark.outbox (
    instance    text        not null,
    epoch       bigint      not null,
    stream      text        not null,
    id          bigint      not null,
    ordinal     integer     not null,
    body        json        not null,
    primary key (instance, epoch, stream, id, ordinal)
)
-- Every row is deleted soon: what counts is how many are dead, not their share of the few that live.
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_analyze_scale_factor = 0,
      autovacuum_analyze_threshold = 20000);
comment on table tidemark.outbox is 'Rows of facts that Kafka has not acknowledged yet';

create function tidemark.writer_lock(_instance text) returns bigint
language sql immutable parallel safe
as $$ select hashtextextended('tidemark.writer ' || _instance, 0) $$;
comment on function tidemark.writer_lock is
    'The advisory lock that each transaction of a writer holds shared and its fence takes exclusively';

-- To be called with the lock held, as a statement of its own: only then does it see what a fence committed before.
create function tidemark.check_epoch(_instance text, _epoch bigint) returns void
language plpgsql volatile
as $$
declare
    _now bigint;
begin
    if current_setting('transaction_isolation') = 'read committed' then
        select epoch into _now from tidemark.writers where instance = _instance;
    else
        -- The snapshot may be older than the lock. A row that was changed since cannot be locked: that is a
        -- serialization failure, and the transaction, once repeated, sees the new epoch.
        select epoch into _now from tidemark.writers where instance = _instance for share;
    end if;
    if _now is distinct from _epoch then
        raise exception using errcode = 'TM001', message =
            format('epoch %s of writer %s is over: the database has %s', _epoch, _instance, coalesce(_now::text, 'none'));
    end if;
end
$$;

-- Takes the fence and IDs beyond `_floor` in one round trip: a volatile function takes a new snapshot for each of its
-- statements (in READ COMMITTED). With `_body` also the only row of the fact that has the (one) ID.
create function tidemark.reserve(
    _instance text, _epoch bigint, _stream text, _sequence oid, _direction integer, _floor bigint, _count integer,
    _body json
) returns bigint[]
language plpgsql volatile
as $$
declare
    _id bigint;
    _ids bigint[] := '{}';
    _refused integer := 0;
begin
    perform pg_advisory_xact_lock_shared(tidemark.writer_lock(_instance));
    perform tidemark.check_epoch(_instance, _epoch);
    while cardinality(_ids) < _count loop
        _id := nextval(_sequence::regclass);
        if _id * _direction > _floor * _direction then
            _ids := _ids || _id;
        else
            -- A server that crashed may give again up to 32 numbers that nobody had committed. They are promised to
            -- be without a fact, so they are left out. More than that is another database.
            _refused := _refused + 1;
            if _refused > 64 then
                raise exception using errcode = 'TM002', message =
                    format('the sequence of stream %s gave %s after %s', _stream, _id, _floor);
            end if;
        end if;
    end loop;
    if _body is not null then
        insert into tidemark.outbox (instance, epoch, stream, id, ordinal, body)
        values (_instance, _epoch, _stream, _ids[1], 0, _body);
    end if;
    return _ids;
end
$$;

-- Takes the lock again: the savepoint in which the ID was reserved may have been rolled back, and its lock with it.
create function tidemark.add_rows(
    _instance text, _epoch bigint, _stream text, _id bigint, _ordinal integer, _bodies text[]
) returns void
language plpgsql volatile
as $$
begin
    perform pg_advisory_xact_lock_shared(tidemark.writer_lock(_instance));
    perform tidemark.check_epoch(_instance, _epoch);
    insert into tidemark.outbox (instance, epoch, stream, id, ordinal, body)
    select _instance, _epoch, _stream, _id, _ordinal + number - 1, body::json
    from unnest(_bodies) with ordinality as given (body, number);
end
$$;

-- Read as it is now: a sequence knows no snapshots.
create function tidemark.sequence_head(_sequence oid, _direction integer) returns bigint
language plpgsql volatile
as $$
declare
    _head bigint;
begin
    execute format('select case when is_called then last_value else last_value - %s end from %s',
        _direction, _sequence::regclass) into _head;
    return _head;
end
$$;

do $$
begin
    create role tidemark_writer nologin;
exception when insufficient_privilege or duplicate_object or unique_violation then
    null;
end
$$;

do $$
begin
    if to_regrole('tidemark_writer') is not null then
        grant usage on schema tidemark to tidemark_writer;
        grant select, insert, update, delete on tidemark.writers, tidemark.writer_streams, tidemark.outbox
            to tidemark_writer;
        grant select on tidemark.writer_schema_version to tidemark_writer;
    end if;
end
$$;
