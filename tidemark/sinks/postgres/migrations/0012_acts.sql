-- What operators asked for by a verb of the command line, and as whom Postgres knew them: what is forced goes through
-- Kafka, which does not tell a consumer who produced a record.
-- Works with code for schema 2.

create table tidemark.acts (
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
comment on table tidemark.acts is 'What operators did by a verb, noted before it was sent';
comment on column tidemark.acts.by is 'Who they said that they were';
comment on column tidemark.acts.seen_as is 'The user as whom they logged in to this database';
comment on column tidemark.acts."offset" is 'Where the record went; null: it is not known to have been sent';
comment on column tidemark.acts.outcome is 'What the verb saw of it; null: it did not wait, or not long enough';

do $$
begin
    create role tidemark_operator nologin;
exception when insufficient_privilege or duplicate_object or unique_violation then
    null;
end
$$;

-- Nobody may write `seen_as`, `seen_from` and `time`, nor change who did what: only what came of it. The pipeline drops what
-- is past its time.
do $$
declare
    someone text;
begin
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.acts to tidemark_reader;
    end if;
    if to_regrole('tidemark_owner') is not null then
        grant delete on tidemark.acts to tidemark_owner;
    end if;
    foreach someone in array array['tidemark_owner', 'tidemark_operator'] loop
        if to_regrole(someone) is not null then
            execute format(
                'grant usage on schema tidemark to %1$I; grant select,'
                ' insert (kind, stream, writer, epoch, prev, id, by, why),'
                ' update (topic, partition, "offset", outcome) on tidemark.acts to %1$I', someone);
        end if;
    end loop;
end
$$;
