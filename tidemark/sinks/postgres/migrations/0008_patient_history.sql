-- Dropping a day gives up before batches have waited long behind it, where somebody reads the history.
-- Works with code for schema 2.

alter function tidemark.drop_history_before(date) set lock_timeout = '200ms';
