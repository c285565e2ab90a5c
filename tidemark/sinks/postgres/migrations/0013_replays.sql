-- Dead letters that were sent to the facts topic again, by where their records stood first: each once.
-- Works with code for schema 2.

create table tidemark.replays (
    topic       text        not null,
    partition   integer     not null,
    "offset"    bigint      not null,
    act         bigint      not null references tidemark.acts on delete cascade,
    primary key (topic, partition, "offset")
);
comment on table tidemark.replays is 'Which act replayed the rejected record that stood there';

do $$
declare
    someone text;
begin
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.replays to tidemark_reader;
    end if;
    if to_regrole('tidemark_owner') is not null then
        grant delete on tidemark.replays to tidemark_owner;
    end if;
    foreach someone in array array['tidemark_owner', 'tidemark_operator'] loop
        if to_regrole(someone) is not null then
            execute format('grant select, insert on tidemark.replays to %I', someone);
        end if;
    end loop;
end
$$;
