-- Late completions that somebody has repaired by hand in what readers made of the stream.
-- Works with code for schema 2.

create table tidemark.late_resolved (
    number      bigint      primary key,
    act         bigint      not null references tidemark.acts on delete cascade
);
comment on table tidemark.late_resolved is 'Which act says that this late completion is repaired';
comment on column tidemark.late_resolved.number is 'Of late_completions, which has a row no longer than its retention';

do $$
declare
    someone text;
begin
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.late_resolved to tidemark_reader;
    end if;
    if to_regrole('tidemark_owner') is not null then
        grant delete on tidemark.late_resolved to tidemark_owner;
    end if;
    foreach someone in array array['tidemark_owner', 'tidemark_operator'] loop
        if to_regrole(someone) is not null then
            execute format('grant select, insert on tidemark.late_resolved to %I', someone);
        end if;
    end loop;
end
$$;
