-- Names without invisible characters, as on Kafka (docs/design.md 3): two writers, or two streams, that look the same cannot be told
-- apart by people.
-- Works with code for schema 2.

create function tidemark.has_invisible(_name text) returns boolean
language sql immutable
as $$
    select _name ~ ('[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800'
        || '\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]')
$$;

revoke all on function tidemark.has_invisible(text) from public;

alter table tidemark.append_streams drop constraint append_streams_stream_check;
alter table tidemark.append_streams add constraint append_streams_stream_check check (
    char_length(stream) between 1 and 255
    and stream !~ '[\u0001-\u0020\u007f-\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]'
    and not tidemark.has_invisible(stream)
);

create or replace function tidemark.append_writer(_writer text) returns text
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
