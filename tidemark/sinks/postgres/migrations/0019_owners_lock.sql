-- Who may only connect to this database can take any advisory lock, so nothing waits for one: the lock of the history is a
-- row that nobody but the owner of the tables may lock. A batch looks for its day first, and then takes no lock at all.
-- Works with code for schema 2.

create table tidemark.history_lock (
    singleton   boolean     primary key default true check (singleton)
);
comment on table tidemark.history_lock is 'Its row is locked while days of history are made or dropped; the functions run as its owner';
insert into tidemark.history_lock default values;

create or replace function tidemark.make_history_day(day date) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as
$$
declare
    part text[];
    parts constant text[] := array[
        ['packed_advances', 'packed_advances_' || to_char(day, 'YYYYMMDD')],
        ['unpacked_advances', 'position_advances_' || to_char(day, 'YYYYMMDD')]
    ];
begin
    if to_regclass('tidemark.' || parts[1][2]) is not null and to_regclass('tidemark.' || parts[2][2]) is not null then
        return;
    end if;
    perform from tidemark.history_lock for update;
    foreach part slice 1 in array parts loop
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
    language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as
$$
declare
    part text;
begin
    perform from tidemark.history_lock for update;
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

alter table tidemark.query_lease add column waits_for text;
comment on column tidemark.query_lease.waits_for is 'What a batch of the owner has waited for in this database for seconds; null: for nothing';
