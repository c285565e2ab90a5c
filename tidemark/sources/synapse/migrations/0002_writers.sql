-- Workers that come and go: one that is taken out of Synapse for good (`tidemark synapse retire` asks for it, the bridge that
-- speaks does it), and one that is heard of when others were told beyond facts of it.

alter table tidemark.synapse_writers
    add column state text not null default 'active' check (state in ('active', 'retiring', 'retired')),
    add column owed bigint;
comment on column tidemark.synapse_writers.owed is
    'Its facts from here to where it joined are still to be told, as late ones: others had been told further';
comment on column tidemark.synapse_writers.state is
    'retiring: to be told up to what was given out, and waited for no more; retired: done, and its rows up to told are told';

alter table tidemark.synapse_streams add column server text;
comment on column tidemark.synapse_streams.server is 'The server_name of its Synapse; null: nobody has looked since this was asked';
