-- Streams that a sink cannot show by a fault of their own, for people: the pipeline itself tries them again.
-- Works with code for schema 2.

create table tidemark.sink_faults (
    sink        text        not null,
    stream      text        not null,
    problem     text        not null,
    since       timestamptz not null default now(),
    primary key (sink, stream)
);
comment on table tidemark.sink_faults is 'Streams that a sink cannot show while it shows the others, and what it said';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, insert, update, delete on tidemark.sink_faults to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.sink_faults to tidemark_reader;
    end if;
end
$$;
