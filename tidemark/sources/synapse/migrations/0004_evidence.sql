-- What the bridge remembers to notice that a database, or a sequence alone, went back, and that a fact came below what was published.

alter table tidemark.synapse_streams add column facts_since bigint, add column head bigint;
comment on column tidemark.synapse_streams.facts_since is
    'tidemark.synapse_facts has every published fact above this ID; null: none is remembered yet';
comment on column tidemark.synapse_streams.head is 'The highest ID that was seen to be given out in this history (a magnitude)';

create table tidemark.synapse_facts (
    stream      text        not null references tidemark.synapse_streams on delete cascade,
    id          bigint      not null,
    marks       bytea       not null,
    is_anchor   boolean     not null,
    primary key (stream, id)
);
comment on table tidemark.synapse_facts is 'Facts that were published: the newest of each stream, and of the older ones one of 500';
comment on column tidemark.synapse_facts.marks is 'A hash of 8 bytes of each of its rows';

create table tidemark.synapse_heads (
    stream      text        not null references tidemark.synapse_streams on delete cascade,
    at          bigint      not null,
    head        bigint      not null,
    primary key (stream, at)
);
comment on table tidemark.synapse_heads is
    'IDs beyond the head were given out after that moment (ms since 1970, clock of Synapse''s server): their rows were not deleted for age yet';

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, insert, update, delete on tidemark.synapse_facts, tidemark.synapse_heads to tidemark_owner;
    end if;
end
$$;
