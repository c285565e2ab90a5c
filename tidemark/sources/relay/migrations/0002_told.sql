-- Whether a disk image was put back, also one that was put back while no relay ran (docs/design.md 4b).

alter table tidemark.append_progress add column server text;
comment on column tidemark.append_progress.server is
    'When the server began on which the epochs began: on another one, which may have an older disk, others begin';

-- A row for each time: one that is changed for ever would leave its old versions where everybody has to pass them while
-- a snapshot is old.
create table tidemark.append_told (
    number      integer     not null,
    upto        bigint      not null,
    primary key (number, upto)
)
with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
comment on table tidemark.append_told is
    'Nothing beyond the highest of them was ever told (magnitudes); it is noted before anything is. They go with the rows below the floor';

-- What was told before this table was is not beyond what was given out.
insert into tidemark.append_told (number, upto)
select number, abs(coalesce(pg_sequence_last_value(ids), after)) from tidemark.append_streams;

do $$
begin
    if to_regrole('tidemark_relay') is not null then
        grant select, insert, delete on tidemark.append_told to tidemark_relay;
    end if;
end
$$;
