-- What streams have of their own: bounds, what alerts compare with, how long history is kept (`tidemark policy`).
-- Works with code for schema 2.

create table tidemark.policies (
    stream      text        not null,
    setting     text        not null,
    value       bigint      not null,
    act         bigint      references tidemark.acts on delete set null,
    primary key (stream, setting),
    check (value between 1 and case when setting like '%\_days' then 36500 else 1000000000 end)
);
comment on table tidemark.policies is 'Settings of single streams; the pipeline reads them every few seconds';
comment on column tidemark.policies.stream is 'A stream, or the beginning of names with a * behind it; the most particular counts';
comment on column tidemark.policies.act is 'Which act set it; null: by hand, or so long ago that the act is forgotten';

do $$
declare
    someone text;
begin
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.policies to tidemark_reader;
    end if;
    foreach someone in array array['tidemark_owner', 'tidemark_operator'] loop
        if to_regrole(someone) is not null then
            execute format('grant select, insert, update, delete on tidemark.policies to %I', someone);
        end if;
    end loop;
end
$$;
