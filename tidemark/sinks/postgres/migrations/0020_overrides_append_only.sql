-- The record of operator overrides is append-only by rights. What came of an override is written once, by the login that
-- began it, and through functions; a policy is changed by a function alone, which writes the audit entry too.
-- Pipelines and sidecars of before go on; verbs of before that change a policy or note an outcome are refused.
-- Works with code for schema 2.

create function tidemark.note_sent(act bigint, to_topic text, to_partition integer, to_offset bigint) returns boolean
    language sql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as
$$
    update tidemark.acts a set (topic, partition, "offset") = (to_topic, to_partition, to_offset)
    where a.number = note_sent.act and a.seen_as = session_user and a."offset" is null and a.outcome is null
    returning true
$$;
comment on function tidemark.note_sent(bigint, text, integer, bigint) is
    'Where the record of an own override went; null: it is of another login, or was noted before';

create function tidemark.note_outcome(act bigint, became text) returns boolean
    language sql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as
$$
    update tidemark.acts a set outcome = became
    where a.number = note_outcome.act and a.seen_as = session_user and a.outcome is null
    returning true
$$;
comment on function tidemark.note_outcome(bigint, text) is
    'What came of an own override; null: it is of another login, or was noted before';

create function tidemark.change_policy(name text, settings text[], wanted bigint[], by_whom text, reason text)
    returns table (act bigint, outcome text)
    language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '5s' as
$$
#variable_conflict use_variable
declare
    was bigint;
    said text[] := '{}';
begin
    -- One after the other: what an entry says that it found, it found.
    lock table tidemark.policies in share row exclusive mode;
    insert into tidemark.acts (kind, stream, writer, epoch, prev, id, by, why)
        values ('POLICY', name, '', 0, 0, 0, by_whom, reason) returning number into act;
    for place in 1 .. cardinality(settings) loop
        was := (select p.value from tidemark.policies p where p.stream = name and p.setting = settings[place]);
        if wanted[place] is not null then
            insert into tidemark.policies as p (stream, setting, value, act)
                values (name, settings[place], wanted[place], act)
                on conflict on constraint policies_pkey do update set value = excluded.value, act = excluded.act;
        elsif was is null then
            raise exception 'the policy % says nothing of %', name, settings[place] using errcode = 'no_data_found';
        else
            delete from tidemark.policies p where p.stream = name and p.setting = settings[place];
        end if;
        said := said || format('%s: %s -> %s', settings[place], coalesce(was::text, 'not set'),
            coalesce(wanted[place]::text, 'not set'));
    end loop;
    outcome := array_to_string(said, ', ');
    update tidemark.acts a set outcome = outcome where a.number = act;
    return next;
end
$$;
comment on function tidemark.change_policy(text, text[], bigint[], text, text) is
    'Set these of a policy, take back what is null; all or none. The audit entry, and what it did';

revoke execute on function tidemark.note_sent(bigint, text, integer, bigint), tidemark.note_outcome(bigint, text),
    tidemark.change_policy(text, text[], bigint[], text, text) from public;

do $$
declare
    someone text;
begin
    foreach someone in array array['tidemark_owner', 'tidemark_operator'] loop
        if to_regrole(someone) is not null then
            execute format(
                'revoke update (topic, partition, "offset", outcome) on tidemark.acts from %1$I;'
                ' revoke insert, update, delete on tidemark.policies from %1$I;'
                ' grant execute on function tidemark.note_sent(bigint, text, integer, bigint),'
                ' tidemark.note_outcome(bigint, text), tidemark.change_policy(text, text[], bigint[], text, text) to %1$I',
                someone);
        end if;
    end loop;
end
$$;
