-- The state of readers, in their own database: a place and the effects of a batch are committed in one transaction.
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
comment on table tidemark_reader.places is 'How far each reader has read. Only one copy of a reader moves the place at a time';
comment on column tidemark_reader.places.positions is 'Vector mode: writer -> ID; a writer that is not named is at linear';
comment on column tidemark_reader.places.late is 'Number of the last late completion that was handed over';
comment on column tidemark_reader.places.is_settled is
    'Vector mode: whether the rows up to linear without a known writer were handed over. A table that is older than its stream has such rows';
comment on column tidemark_reader.places.late_part is 'Number of the late completion that is being handed over, and the ID up to which it was handed over';
comment on column tidemark_reader.places.must_read is 'Ranges of late completions beyond the place: the table is read there regardless of the evidence';

create table if not exists tidemark_reader.delivered (
    reader      text        not null,
    stream      text        not null,
    id          bigint      not null,
    writer      text        not null,
    epoch       bigint      not null,
    primary key (reader, stream, id)
);
comment on table tidemark_reader.delivered is
    'Facts that were handed over and may come again, as late or in order: they are not handed over again';

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
    'When an operator requested a retry; null: no retry was requested';
comment on table tidemark_reader.parked is
    'Facts that a reader passed without their effects, because its handler failed. An operator retries or deletes them';

create table if not exists tidemark_reader.copies (
    reader      text        not null,
    stream      text        not null,
    copy        text        not null,
    seen_at     timestamptz not null default clock_timestamp(),
    primary key (reader, stream, copy)
);
comment on table tidemark_reader.copies is 'Running copies of readers with partitions. Each copy reads a share of the partitions';
