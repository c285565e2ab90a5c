-- What shows that rows came from elsewhere, and what was published before they did (docs/design.md 4b).
-- Works with code for schema 2.

alter table tidemark.append_progress add column published bigint not null default 0, add column written_by xid;
comment on column tidemark.append_progress.published is
    'The highest floor that was left when the database went back (a magnitude): up to here an ID without a row may have had a published fact';
comment on column tidemark.append_progress.written_by is
    'The transaction of the relay that wrote this row. Another one has put the row there if it differs from xmin: a restore, or replication';
