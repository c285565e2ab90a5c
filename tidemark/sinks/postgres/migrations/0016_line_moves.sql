-- Where a line went in a batch that moved no position of its stream: a retirement lets a line go, and makes no advance.
-- Works with code for schema 2.

create table tidemark.line_moves (
    stream      text        not null,
    prev        bigint      not null,
    linear      bigint      not null,
    retired     text[]      not null,
    epochs      bigint[]    not null,
    batch       bigint      not null,
    time        timestamptz not null
);
create index line_moves_time on tidemark.line_moves (stream, time);
comment on table tidemark.line_moves is 'Moves of lines that no advance tells; what advances tell is in position_advances';
comment on column tidemark.line_moves.retired is 'Writers that retired in that batch, each with its epoch in epochs';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, insert, update, delete on tidemark.line_moves to tidemark_owner;
    end if;
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.line_moves to tidemark_reader;
    end if;
end
$$;
