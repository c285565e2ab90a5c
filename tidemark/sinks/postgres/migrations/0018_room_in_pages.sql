-- Rows that each batch writes anew: half of a page is left free, so that the new version of every row finds room beside
-- the old one, and no index is touched. Pages of before get their room as they are written.
-- Works with code for schema 2.

alter table tidemark.streams set (fillfactor = 45);
alter table tidemark.stream_positions set (fillfactor = 45);
