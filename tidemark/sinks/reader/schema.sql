-- A reader's own bookkeeping, in its own database, so that a place and the effects of a batch are committed together.
create schema if not exists tidemark_reader;

create table if not exists tidemark_reader.places (
    reader      text        not null,
    stream      text        not null,
    mode        text        not null,
    linear      bigint      not null,
    positions   jsonb       not null,
    late        bigint      not null,
    late_part   jsonb,
    must_read   jsonb       not null,
    version     bigint      not null,
    updated_at  timestamptz not null default now(),
    is_settled  boolean     not null default true,
    primary key (reader, stream)
);
comment on table tidemark_reader.places is 'How far each reader has read; one copy of a reader moves it at a time';
comment on column tidemark_reader.places.positions is 'Vector mode: writer -> ID; a writer that is not named is at linear';
comment on column tidemark_reader.places.late is 'Number of the last late completion that was handed over';
comment on column tidemark_reader.places.is_settled is
    'Vector mode: rows up to linear of writers that Tidemark does not know, which a table that is older than its stream has, were handed over';
comment on column tidemark_reader.places.late_part is 'Of the next one: its number, and the ID up to which it was handed over';
comment on column tidemark_reader.places.must_read is 'Late completions beyond the place: the table is read there, whatever the evidence is';

create table if not exists tidemark_reader.delivered (
    reader      text        not null,
    stream      text        not null,
    id          bigint      not null,
    writer      text        not null,
    epoch       bigint      not null,
    primary key (reader, stream, id)
);
comment on table tidemark_reader.delivered is
    'Facts that were handed over where an operator had skipped: their late completion must not hand them over again';

create table if not exists tidemark_reader.parked (
    reader      text        not null,
    stream      text        not null,
    id          bigint      not null,
    reason      text        not null,
    parked_at   timestamptz not null default now(),
    retry_at    timestamptz,
    primary key (reader, stream, id)
);
comment on column tidemark_reader.parked.retry_at is
    'When an operator asked for the fact to be handed over again; null: nobody did';
comment on table tidemark_reader.parked is
    'Facts that a reader passed without their effects, because its handler failed on them and parks them: for a person';

create table if not exists tidemark_reader.copies (
    reader      text        not null,
    stream      text        not null,
    copy        text        not null,
    seen_at     timestamptz not null default clock_timestamp(),
    primary key (reader, stream, copy)
);
comment on table tidemark_reader.copies is 'The copies of readers in partitions that run: each has a share of the partitions';
