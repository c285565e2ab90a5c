-- A fact has a bound, as each of its rows has: the relay sends a fact as a whole, within bounded memory.
-- Works with code for schema 2.

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
revoke all on function tidemark.fact_bytes(text, text[]) from public;

create or replace function tidemark.append_fact(_writer text, _stream text, _rows jsonb[]) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
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
    perform pg_advisory_xact_lock_shared(1414087749 + _number, hashtext(_writer));
    _id := nextval(_ids);
    insert into tidemark.append_outbox (number, id, rows, bytes, writer)
    values (_number, _id, _texts, _bytes, _writer);
    return _id;
end
$$;

create or replace function tidemark.complete(stream text, id bigint, variadic rows jsonb[] default '{}') returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
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
