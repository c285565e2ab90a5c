-- Who is told the events of a room: each stay of a member, by the turns of its first and last event (docs/explanation/rooms.md).
-- What was told before this file has turn 0, and goes to whoever is a member now.

alter table rooms.rooms add column turn bigint not null default 0;
comment on column rooms.rooms.turn is 'How often the room''s lock was taken';
alter table rooms.timeline add column turn bigint not null default 0;
comment on column rooms.timeline.turn is 'Of the room as the event was persisted: the order of IDs may be another';
comment on column rooms.timeline.recipient is
    'The user to whom alone it is sent: an out-of-band membership, or what ended a stay in the room';

create table rooms.stays (
    member      text    not null,
    room        text    not null references rooms.rooms,
    began       bigint  not null,
    ended       bigint,
    left_by     bigint  references rooms.timeline,
    primary key (member, room, began)
);
create index stays_by_end on rooms.stays (member, left_by);
create unique index stays_open on rooms.stays (room, member) where ended is null;
comment on column rooms.stays.left_by is 'The fact that tells the member of its end: greater than those of all events of the stay';

insert into rooms.stays (member, room, began) select member, room, 0 from rooms.memberships where membership = 'join';
