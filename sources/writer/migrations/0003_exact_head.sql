-- Works with code for schema 2.
-- While nextval writes its log the row of a sequence says up to 32 more than was given out, and a plain select reads it
-- without the lock that nextval has: a heartbeat could announce IDs that were still to come as empty.

create or replace function tidemark.sequence_head(_sequence oid, _direction integer) returns bigint
language plpgsql volatile
as $$
declare
    _head bigint;
begin
    execute format('select case when is_called then pg_sequence_last_value(%s) else last_value - %s end from %s',
        _sequence, _direction, _sequence::regclass) into _head;
    return _head;
end
$$;
