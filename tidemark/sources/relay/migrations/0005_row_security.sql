-- Row level security that is forced on our tables is an error in these functions, and never just no rows: what they do
-- rests on rows that are not there. The settings of the caller's session stay as they are.
-- Works with code for schema 2.

alter function tidemark.append_fact(text, text, jsonb[]) set row_security = off;
alter function tidemark.append_many(text, jsonb[], text) set row_security = off;
alter function tidemark.reserve(text, text) set row_security = off;
alter function tidemark.complete(text, bigint, jsonb[]) set row_security = off;
alter function tidemark.create_stream(text, text, bigint) set row_security = off;
alter function tidemark.drop_stream(text) set row_security = off;
alter function tidemark.append_beat(text) set row_security = off;
alter function tidemark.retire_writer(text, text) set row_security = off;
