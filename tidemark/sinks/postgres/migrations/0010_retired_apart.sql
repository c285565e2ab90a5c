-- The table of a stream's retired writers lies apart from its state: it may be half a megabyte, and few batches change it.
-- Works with code for schema 2.

alter table tidemark.streams add column retired bytea;
comment on column tidemark.streams.retired is
    'Encoded table of the retired writers, which goes in the place of the last byte of state; null: state has all';
