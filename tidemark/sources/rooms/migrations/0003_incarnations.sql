-- What clients hold of the rooms is of one incarnation of their database (docs/explanation/rooms.md).

create table rooms.incarnations (began bigint primary key);
comment on table rooms.incarnations is 'When the database was opened again after it went back: microseconds since 1970; 0: the first one';
insert into rooms.incarnations values (0);

-- To be called in a database that may lack what clients were told, before they are let in: a backup that was put back, a
-- standby that was not in step. `heads` are the IDs up to which Tidemark knows each stream: {"events": 950, ...}; `margin`
-- is more than were given out and had not come to Tidemark.
create function rooms.begin_anew(heads jsonb, margin bigint default 10000) returns bigint
language plpgsql volatile
as $$
declare
    _now constant bigint := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    _of record;
begin
    for _of in select * from tidemark.append_streams where ids is not null order by number loop
        if heads->>_of.stream is null then
            raise exception using errcode = 'invalid_parameter_value',
                message = format('up to where Tidemark knows the stream %L is not given', _of.stream),
                hint = 'Ask Tidemark''s Postgres: select jsonb_object_agg(stream, head) from tidemark.streams';
        end if;
        -- Whoever has taken an ID holds the sequence until its transaction ends.
        execute format('alter sequence %s no cycle', _of.ids);
        perform setval(_of.ids, _of.direction * (margin + greatest(
            abs((heads->>_of.stream)::bigint), abs(coalesce(pg_sequence_last_value(_of.ids), _of.after))
        )));
    end loop;
    insert into rooms.incarnations values (greatest(_now, (select max(began) + 1 from rooms.incarnations)));
    return (select max(began) from rooms.incarnations);
end
$$;
