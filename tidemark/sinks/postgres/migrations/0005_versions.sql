-- The version of the pipeline, so that a sidecar or a pipeline of a version far from it can say so.
-- Works with code for schema 2.

alter table tidemark.query_lease add column version text not null default '';
comment on column tidemark.query_lease.version is 'Of the Tidemark that took the lease last; empty before that was noted';
