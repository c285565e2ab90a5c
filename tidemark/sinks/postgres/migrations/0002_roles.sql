-- Two roles without login, to be granted to people and services. A user who may not create roles can still migrate:
-- an administrator makes the roles beforehand, or nobody needs them.

do $$
begin
    create role tidemark_owner nologin;
exception when insufficient_privilege or duplicate_object or unique_violation then
    null;
end
$$;

do $$
begin
    create role tidemark_reader nologin;
exception when insufficient_privilege or duplicate_object or unique_violation then
    null;
end
$$;

revoke execute on function tidemark.make_history_day(date), tidemark.drop_history_before(date) from public;

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant usage on schema tidemark to tidemark_owner;
        grant select, insert, update, delete on all tables in schema tidemark to tidemark_owner;
        grant usage on all sequences in schema tidemark to tidemark_owner;
        grant execute on all functions in schema tidemark to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant usage on schema tidemark to tidemark_reader;
        grant select on all tables in schema tidemark to tidemark_reader;
    end if;
end
$$;
