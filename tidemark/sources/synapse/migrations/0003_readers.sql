-- People who look at what is held back are told which streams a bridge tells, and so which remedy there is.

do $$
begin
    if to_regrole('tidemark_reader') is not null then
        grant select on tidemark.synapse_streams to tidemark_reader;
    end if;
end
$$;
