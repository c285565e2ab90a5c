-- Retention follows the clock of this server, not that of the pipeline's host, and never moves on by more than a day at a run:
-- a clock that jumps ahead deletes one day of history at a time, while an alert says that clocks differ.
-- Works with code for schema 19.

create table tidemark.retention_clock (
    singleton   boolean     primary key default true check (singleton),
    time        timestamptz not null
);
comment on table tidemark.retention_clock is 'The time by which retention last dropped history, to its end';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, insert, update, delete on tidemark.retention_clock to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.retention_clock to tidemark_reader;
    end if;
end
$$;
