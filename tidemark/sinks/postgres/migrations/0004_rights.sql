-- Three roles without login, which can be granted to people and services. A user without CREATEROLE can still migrate: an
-- administrator creates the roles before, or the installation does not use the roles.

do $$
declare
    name text;
begin
    foreach name in array array['tidemark_owner', 'tidemark_reader', 'tidemark_operator'] loop
        begin
            execute format('create role %I nologin', name);
        exception when insufficient_privilege or duplicate_object or unique_violation then
            null;
        end;
    end loop;
end
$$;

revoke execute on function tidemark.make_history_day(date), tidemark.drop_history_before(date),
    tidemark.note_sent(bigint, text, integer, bigint), tidemark.note_outcome(bigint, text),
    tidemark.note_replay(bigint, text, integer, bigint), tidemark.note_resolved(bigint, bigint),
    tidemark.change_policy(text, text[], bigint[], text, text) from public;

do $$
declare
    someone text;
begin
    if to_regrole('tidemark_owner') is not null then
        grant usage on schema tidemark to tidemark_owner;
        grant select, insert, update, delete on tidemark.schema_version, tidemark.streams, tidemark.stream_positions,
            tidemark.stream_gaps, tidemark.skips, tidemark.late_completions, tidemark.linear_moves, tidemark.dead_letters,
            tidemark.unsent_dead_letters, tidemark.requeues, tidemark.kafka_offsets, tidemark.applied_batches, tidemark.topics,
            tidemark.pipeline, tidemark.query_lease, tidemark.sink_faults, tidemark.lagging_partitions,
            tidemark.retention_clock, tidemark.writer_numbers, tidemark.packed_advances, tidemark.history_since
            to tidemark_owner;
        grant select on tidemark.position_advances to tidemark_owner;
        grant delete on tidemark.overrides, tidemark.replays, tidemark.late_resolved to tidemark_owner;
        grant usage on sequence tidemark.skips_number_seq, tidemark.applied_batches_number_seq,
            tidemark.writer_numbers_number_seq to tidemark_owner;
        -- Each owner of the lease raises the sequence of late completions: a restored database must not give out numbers
        -- that readers and Redis already have.
        grant usage, select, update on sequence tidemark.late_completions_number_seq to tidemark_owner;
        grant execute on function tidemark.make_history_day(date), tidemark.drop_history_before(date) to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant usage on schema tidemark to tidemark_reader;
        grant select on tidemark.schema_version, tidemark.streams, tidemark.stream_positions, tidemark.stream_gaps,
            tidemark.skips, tidemark.late_completions, tidemark.linear_moves, tidemark.dead_letters,
            tidemark.unsent_dead_letters, tidemark.requeues, tidemark.kafka_offsets, tidemark.applied_batches, tidemark.topics,
            tidemark.pipeline, tidemark.query_lease, tidemark.sink_faults, tidemark.lagging_partitions,
            tidemark.retention_clock, tidemark.writer_numbers, tidemark.packed_advances, tidemark.history_since,
            tidemark.position_advances, tidemark.overrides, tidemark.replays, tidemark.late_resolved, tidemark.policies
            to tidemark_reader;
    end if;
    -- No role may write seen_as, seen_from and time of an override. Only the functions may change an override later.
    foreach someone in array array['tidemark_owner', 'tidemark_operator'] loop
        if to_regrole(someone) is not null then
            execute format(
                'grant usage on schema tidemark to %1$I;'
                ' grant select, insert (kind, stream, writer, epoch, prev, id, by, why) on tidemark.overrides to %1$I;'
                ' grant select on tidemark.replays, tidemark.late_resolved, tidemark.policies to %1$I;'
                ' grant execute on function tidemark.note_sent(bigint, text, integer, bigint),'
                ' tidemark.note_outcome(bigint, text), tidemark.note_replay(bigint, text, integer, bigint),'
                ' tidemark.note_resolved(bigint, bigint), tidemark.change_policy(text, text[], bigint[], text, text) to %1$I',
                someone);
        end if;
    end loop;
end
$$;
