"""What Synapse's streams are in its database: their sequences, their tables, and what a missing row proves there.

Each question gives a row of a fact as JSON in the form in which Synapse itself sends it, `[...]`; of several rows of
one fact the later question's come last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemark.streaming.values.direction import Direction


@dataclass(frozen=True, slots=True)
class TableQuestion:
    """`id` is its column of stream IDs, `row` an expression of JSON over `table`, which may be a join. `identity` is an
    expression of text that is the same for as long as the row is there, and another one for another row of that ID.

    `is_proof`: no other history of the database has a row of the same identity. Rows that only say that something of a
    user has changed are none: they may come again as they were, even in a transaction of the same number.
    """

    table: str
    id: str
    row: str
    identity: str
    is_proof: bool = True

    @property
    def name(self) -> str:
        """That of the table with the rows."""
        return self.table.partition(" ")[0]

    @property
    def alias(self) -> str:
        return self.table.split(" ")[1]

    def sql(self, place: int) -> str:
        """Asks for the IDs between `%(low)s` and `%(high)s`, signed."""
        return self._select(f"{place} as place, ({self.row})::text as row")

    def identities(self) -> str:
        """The same without the rows."""
        return self._select("0 as place")

    def _select(self, more: str) -> str:
        identity = f"coalesce({self.alias}.instance_name, '') || {self.identity}"
        return (
            f"select {self.alias}.{self.id} as id, {self.alias}.instance_name as writer,"
            f" ('x' || left(md5({identity}), 16))::bit(64)::bigint as mark,"
            f" {self.is_proof} as is_proof, {more}"
            f" from {self.table} where {self.alias}.{self.id} between %(low)s and %(high)s"
        )


@dataclass(frozen=True, slots=True)
class SynapseStream:
    """`name` as it is on the channel. `positions` is its name in `stream_positions`, empty where it has none.

    `keeps`: every fact keeps a row for long enough; else rows are overwritten or deleted, and a missing one proves
    nothing. `kept_for`: seconds for which each row surely stays, None: for ever.
    """

    name: str
    sequence: str
    questions: Sequence[TableQuestion]
    keeps: bool
    positions: str = ""
    before: Sequence[str] = ()
    """Tables that a transaction writes to before it comes to those of the rows."""
    towards: Direction = Direction.FORWARD
    kept_for: float | None = None


_DAY = 86_400.0
_ABOUT = (
    " left join redactions x using (event_id) left join event_relations r using (event_id)"
    " left join room_memberships m using (event_id)"
)
_ROW = "event_id, e.room_id, e.type, e.state_key, x.redacts, r.relates_to_id"
_LIVE = f"json_build_array('ev', json_build_array({_ROW}, m.membership, e.rejection_reason is not null, e.outlier))"
_BACKFILLED = f"json_build_array({_ROW})"


def _events(row: str) -> tuple[TableQuestion, TableQuestion]:
    return (
        TableQuestion(f"events e{_ABOUT}", "stream_ordering", row, "e.event_id"),
        # An event that was held without its room's state, and now is with it: its row in `events` keeps its older ID.
        TableQuestion(
            f"ex_outlier_stream o join events e using (event_id){_ABOUT}", "event_stream_ordering", row, "event_id"
        ),
    )


_STATE = TableQuestion(
    "current_state_delta_stream d",
    "stream_id",
    "json_build_array('state', json_build_array(d.room_id, d.type, d.state_key, d.event_id))",
    "json_build_array(d.room_id, d.type, d.state_key, d.event_id)::text",
)


_WRITTEN_BY = "t.xmin::text"
"""The transaction that wrote the row: nearly always another one in a history in which the ID was given out again."""


def _question(table: str, row: str, identity: str = "") -> TableQuestion:
    """`identity`: what is more of it than the row has."""
    more = f", {identity}" if identity else ""
    whole = f"json_build_array({row}{more})::text"
    return TableQuestion(f"{table} t", "stream_id", f"json_build_array({row})", whole, _WRITTEN_BY not in more)


_KNOWN = (
    SynapseStream(
        "events",
        "events_stream_seq",
        [*_events(_LIVE), _STATE],
        keeps=True,
        positions="events",
        before=["event_json"],
    ),
    SynapseStream(
        "backfill",
        "events_backfill_stream_seq",
        _events(_BACKFILLED),
        keeps=True,
        positions="backfill",
        before=["event_json"],
        towards=Direction.BACKWARD,
    ),
    SynapseStream(
        "caches",
        "cache_invalidation_stream_seq",
        [_question("cache_invalidation_stream_by_instance", "t.cache_func, to_json(t.keys), t.invalidation_ts")],
        keeps=True,
        kept_for=6 * _DAY,  # Synapse deletes them after 7, by its own clock
    ),
    SynapseStream(
        "push_rules",
        "push_rules_stream_sequence",
        [_question("push_rules_stream", "t.user_id", _WRITTEN_BY)],
        keeps=True,
        positions="push_rules_stream",
    ),
    SynapseStream(
        "account_data",
        "account_data_sequence",
        [
            _question("account_data", "t.user_id, null, t.account_data_type", "t.content"),
            _question("room_account_data", "t.user_id, t.room_id, t.account_data_type", "t.content"),
            _question("room_tags_revisions", "t.user_id, t.room_id, 'm.tag'", _WRITTEN_BY),
        ],
        keeps=False,
        positions="account_data",
    ),
    SynapseStream(
        "to_device",
        "device_inbox_sequence",
        [
            _question("device_inbox", "t.user_id", "t.device_id, t.message_json"),
            _question("device_federation_outbox", "t.destination", "t.messages_json"),
        ],
        keeps=False,
        positions="to_device",
    ),
    SynapseStream(
        "receipts",
        "receipts_sequence",
        [
            _question(
                "receipts_linearized",
                "t.room_id, t.receipt_type, t.user_id, t.event_id, t.thread_id, t.data::json",
            )
        ],
        keeps=False,
        positions="receipts",
    ),
    SynapseStream(
        "device_lists",
        "device_lists_sequence",
        [
            _question("device_lists_stream", "t.user_id, false, false", f"t.device_id, {_WRITTEN_BY}"),
            _question("user_signature_stream", "t.from_user_id, true, false", _WRITTEN_BY),
            # A poke that was sent is updated.
            _question("device_lists_outbound_pokes", "t.user_id, false, true", "t.destination, t.device_id, t.ts"),
        ],
        keeps=False,
        positions="device_lists_stream",
    ),
    SynapseStream(
        "presence",
        "presence_stream_sequence",
        [
            _question(
                "presence_stream",
                "t.user_id, t.state, t.last_active_ts, t.last_federation_update_ts, t.last_user_sync_ts,"
                " t.status_msg, t.currently_active",
            )
        ],
        keeps=False,
        positions="presence_stream",
    ),
)
STREAMS: Mapping[str, SynapseStream] = {each.name: each for each in _KNOWN}

_MEMORY = "it exists only in its writer's memory, where its IDs start again with each start"
_OTHER = "nobody has examined what its tables prove"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("typing", "federation", "presence_federation"), _MEMORY),
    **dict.fromkeys(
        (
            "pushers",
            "thread_subscriptions",
            "un_partial_stated_room",
            "un_partial_stated_event",
            "sticky_events",
            "profile_updates",
            "quarantined_media",
        ),
        _OTHER,
    ),
}
"""Streams of Synapse that are none of ours, and why."""
