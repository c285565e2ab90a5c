-- What shows a writer that its database went back (docs/design.md 4): which history of it each start found, and a token
-- that each start leaves.
--
-- Works with code for schema 1.

alter table tidemark.writers
    add column server  timestamptz,
    add column history text,
    add column history_epoch bigint;
comment on column tidemark.writers.server is
    'When the server began on which the epoch began: while that is the same, so is the history';
comment on column tidemark.writers.history is 'tidemark.history() as the epoch began, null where that is not known';
comment on column tidemark.writers.history_epoch is 'That epoch: older code begins one without looking';

alter table tidemark.writer_streams
    add column start    text,
    add column starting text,
    add column retired  boolean not null default false;
comment on column tidemark.writer_streams.start is 'The token of the last JOIN that Kafka has acknowledged';
comment on column tidemark.writer_streams.starting is
    'The token of a JOIN that may have been sent; a start that follows one that broke off takes it over';
comment on column tidemark.writer_streams.retired is
    'The instance writes it no more. The row is kept for its token, should it write it again';

-- System identifier, database and timeline of the server, null where they cannot be read. The timeline is that of the
-- log that is being written: pg_control_checkpoint() tells of a promotion only after the next checkpoint. Runs with the
-- rights of the schema's owner.
create function tidemark.history() returns text
language plpgsql volatile security definer set search_path = pg_catalog
as $$
begin
    if pg_is_in_recovery() then
        raise exception using errcode = 'read_only_sql_transaction', message = 'this server is a standby';
    end if;
    return (
        select format('%s/%s/%s', system_identifier, (select oid from pg_database where datname = current_database()),
            ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer)
        from pg_control_system()
    );
exception when insufficient_privilege or feature_not_supported or undefined_function then
    return null;
end
$$;
comment on function tidemark.history is 'What changes where the database is another one: restored elsewhere, or failed over';

-- To be called with the lock held, as a statement of its own: only then does it see what a fence committed before.
-- TM001: another has taken over. TM002: this is not the database in which the epoch began. Epochs only rise, so one that
-- is gone shows that too. The history costs more than the rest, and is looked at where the server has begun anew.
create or replace function tidemark.check_epoch(_instance text, _epoch bigint) returns void
language plpgsql volatile
as $$
declare
    _now tidemark.writers;
    _history text;
begin
    if current_setting('transaction_isolation') = 'read committed' then
        select * into _now from tidemark.writers where instance = _instance;
    else
        -- The snapshot may be older than the lock. A row that was changed since cannot be locked: that is a
        -- serialization failure, and the transaction, once repeated, sees the new epoch.
        select * into _now from tidemark.writers where instance = _instance for share;
    end if;
    if _now.epoch > _epoch then
        raise exception using errcode = 'TM001', message =
            format('epoch %s of writer %s is over: the database has %s', _epoch, _instance, _now.epoch);
    elsif _now.epoch is distinct from _epoch then
        raise exception using errcode = 'TM002', message =
            format('it began epoch %s, and the database knows %s', _epoch, coalesce(_now.epoch::text, 'none'));
    end if;
    if _now.history_epoch = _epoch and _now.server is distinct from pg_postmaster_start_time() then
        _history := tidemark.history();
        if _history <> _now.history then
            raise exception using errcode = 'TM002', message = format(
                'it joined in %s and this is %s (system identifier/database/timeline)', _now.history, _history);
        end if;
    end if;
end
$$;
