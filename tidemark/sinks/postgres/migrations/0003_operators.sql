-- Operator overrides and policies. Rights make the table of overrides append-only. Only functions write the offset and the
-- outcome of an override, and the dead letter or late completion that it concerns: each once, and only for the login that
-- logged the override. Only a function changes a policy; it also logs the change as an override.

create table tidemark.overrides (
    number      bigint      generated always as identity primary key,
    kind        text        not null,
    stream      text        not null,
    writer      text        not null,
    epoch       bigint      not null,
    prev        bigint      not null,
    id          bigint      not null,
    by          text        not null,
    why         text        not null,
    seen_as     text        not null default session_user,
    seen_from   inet        default inet_client_addr(),
    time        timestamptz not null default clock_timestamp(),
    topic       text,
    partition   integer,
    "offset"    bigint,
    outcome     text
);
comment on table tidemark.overrides is
    'Operator overrides by a command of Tidemark, written before the command sends its record. A Kafka consumer cannot see who produced a record';
comment on column tidemark.overrides.by is 'The name that the operator gave';
comment on column tidemark.overrides.seen_as is 'The login in this database';
comment on column tidemark.overrides."offset" is 'Offset of the record; null: the record is not known to be sent';
comment on column tidemark.overrides.outcome is 'Outcome that the command found; null: the command did not wait, or not long enough';

create table tidemark.replays (
    topic       text        not null,
    partition   integer     not null,
    "offset"    bigint      not null,
    act         bigint      not null references tidemark.overrides on delete cascade,
    primary key (topic, partition, "offset")
);
comment on table tidemark.replays is
    'Rejected records that an operator replayed: sent to the facts topic again, each at most once. The offset is that of the original record';

create table tidemark.late_resolved (
    number      bigint      primary key,
    act         bigint      not null references tidemark.overrides on delete cascade
);
comment on table tidemark.late_resolved is
    'Late completions that an operator has repaired by hand in the data that readers derived from the stream';
comment on column tidemark.late_resolved.number is 'Number of the late completion. Retention may have deleted its row in late_completions';

create table tidemark.policies (
    stream      text        not null,
    setting     text        not null,
    value       bigint      not null,
    act         bigint      references tidemark.overrides on delete set null,
    primary key (stream, setting),
    check (value between 1 and case when setting like '%\_days' then 36500 else 1000000000 end)
);
comment on table tidemark.policies is
    'Settings of single streams: bounds, alert thresholds, retention. The pipeline reads them every few seconds';
comment on column tidemark.policies.stream is
    'A stream, or a prefix of stream names followed by *. The most specific entry counts';
comment on column tidemark.policies.act is
    'The override that set the value; null: a person set the value in the table, or retention has deleted the override';

create function tidemark.note_sent(act bigint, to_topic text, to_partition integer, to_offset bigint) returns boolean
    language sql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as
$$
    update tidemark.overrides a set (topic, partition, "offset") = (to_topic, to_partition, to_offset)
    where a.number = note_sent.act and a.seen_as = session_user and a."offset" is null and a.outcome is null
    returning true
$$;
comment on function tidemark.note_sent(bigint, text, integer, bigint) is
    'Stores the offset of the record of an override. Returns null if the override belongs to another login, or has an offset or an outcome';

create function tidemark.note_outcome(act bigint, became text) returns boolean
    language sql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as
$$
    update tidemark.overrides a set outcome = became
    where a.number = note_outcome.act and a.seen_as = session_user and a.outcome is null
    returning true
$$;
comment on function tidemark.note_outcome(bigint, text) is
    'Stores the outcome of an override. Returns null if the override belongs to another login, or has an outcome';

create function tidemark.note_replay(act bigint, of_topic text, of_partition integer, of_offset bigint) returns boolean
    language sql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as
$$
    insert into tidemark.replays (topic, partition, "offset", act)
    select of_topic, of_partition, of_offset, a.number
    from tidemark.overrides a where a.number = note_replay.act and a.seen_as = session_user and a.kind = 'REPLAY'
    on conflict do nothing
    returning true
$$;
comment on function tidemark.note_replay(bigint, text, integer, bigint) is
    'Stores the rejected record that an override replays. Returns null if the override belongs to another login, or the record was replayed before';

create function tidemark.note_resolved(act bigint, late bigint) returns boolean
    language sql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as
$$
    insert into tidemark.late_resolved (number, act)
    select late, a.number
    from tidemark.overrides a where a.number = note_resolved.act and a.seen_as = session_user and a.kind = 'RESOLVE'
    on conflict do nothing
    returning true
$$;
comment on function tidemark.note_resolved(bigint, bigint) is
    'Stores the late completion that an override resolves. Returns null if the override belongs to another login, or the late completion was resolved before';

create function tidemark.change_policy(name text, settings text[], wanted bigint[], by_whom text, reason text)
    returns table (act bigint, outcome text)
    language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as
$$
#variable_conflict use_variable
declare
    was bigint;
    changes text[] := '{}';
begin
    -- One call at a time, so that the old values in the override are the values that this call replaces.
    lock table tidemark.policies in share row exclusive mode;
    insert into tidemark.overrides (kind, stream, writer, epoch, prev, id, by, why)
        values ('POLICY', name, '', 0, 0, 0, by_whom, reason) returning number into act;
    for place in 1 .. cardinality(settings) loop
        was := (select p.value from tidemark.policies p where p.stream = name and p.setting = settings[place]);
        if wanted[place] is not null then
            insert into tidemark.policies as p (stream, setting, value, act)
                values (name, settings[place], wanted[place], act)
                on conflict on constraint policies_pkey do update set value = excluded.value, act = excluded.act;
        elsif was is null then
            raise exception 'the policy % does not set %', name, settings[place] using errcode = 'no_data_found';
        else
            delete from tidemark.policies p where p.stream = name and p.setting = settings[place];
        end if;
        changes := changes || format('%s: %s -> %s', settings[place], coalesce(was::text, 'not set'),
            coalesce(wanted[place]::text, 'not set'));
    end loop;
    outcome := array_to_string(changes, ', ');
    update tidemark.overrides a set outcome = outcome where a.number = act;
    return next;
end
$$;
comment on function tidemark.change_policy(text, text[], bigint[], text, text) is
    'Sets the given settings of a policy, and removes settings whose value is null; all or none. Returns the number of the override, and the changes as text';
