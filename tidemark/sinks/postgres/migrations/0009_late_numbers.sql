-- Each owner of the lease sets the numbers of late completions ahead, so that none comes again from a database that went
-- back: readers and Redis know by them what they have.
-- Works with code for schema 2.

do $$
begin
    if to_regrole('tidemark_owner') is not null then
        grant select, update on sequence tidemark.late_completions_number_seq to tidemark_owner;
    end if;
end
$$;
