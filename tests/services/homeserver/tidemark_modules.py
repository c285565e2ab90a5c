"""Modules of Synapse, which its own processes load: what no client of one server alone can have them do.

They run in Synapse's Python, not in this project's.
"""

from typing import Any

from synapse.api.room_versions import KNOWN_ROOM_VERSIONS
from synapse.events.snapshot import EventContext
from synapse.http.server import DirectServeJsonResource
from synapse.http.servlet import parse_json_object_from_request
from synapse.replication.tcp.protocol import ClientReplicationStreamProtocol
from synapse.replication.tcp.streams import STREAMS_MAP
from twisted.internet.protocol import ClientFactory


class Backfill(DirectServeJsonResource):
    """`POST /_synapse/client/backfill` of a room, a sender and how many: messages from before the first one are
    persisted as those of another server are that were asked for its history. The event writer of the room does it.

    With `outlier`, each is first persisted without the room's state, and then with it.
    """

    def __init__(self, _: object, api: Any) -> None:
        super().__init__()
        self._hs = api._hs
        api.register_web_resource("/_synapse/client/backfill", self)

    async def _async_render_POST(self, request: Any) -> tuple[int, dict[str, list[str]]]:
        body = parse_json_object_from_request(request)
        room, sender = body["room"], body["sender"]
        store, storage = self._hs.get_datastores().main, self._hs.get_storage_controllers()
        first = (await storage.state.get_current_state_ids(room))["m.room.member", sender]
        version = KNOWN_ROOM_VERSIONS[await store.get_room_version_id(room)]
        made = []
        for number in range(body["count"]):
            content = {"msgtype": "m.text", "body": f"long ago {number}"}
            what = {"type": "m.room.message", "room_id": room, "sender": sender, "content": content}
            builder = self._hs.get_event_builder_factory().for_room_version(version, what)
            event = await builder.build(prev_event_ids=[first], auth_event_ids=None)
            persist = self._hs.get_federation_event_handler().persist_events_and_notify
            if body["outlier"]:
                event.internal_metadata.outlier = True
                await persist(room, [(event, EventContext.for_outlier(storage))], backfilled=True)
                event.internal_metadata.outlier = False
            context = await self._hs.get_state_handler().compute_event_context(event)
            await persist(room, [(event, context)], backfilled=True)
            made.append(event.event_id)
        return 200, {"events": made}


class LineClient(ClientFactory):
    """Follows the line protocol over TCP as workers did before they had Redis, by Synapse's own classes, which leave at
    what they do not understand. `GET /_synapse/client/heard` gives what it has heard.
    """

    def __init__(self, config: Any, api: Any) -> None:
        self._hs = api._hs
        self._heard = Heard()
        api.register_web_resource("/_synapse/client/heard", self._heard)
        self._hs.get_reactor().connectTCP(config["host"], config["port"], self)

    def buildProtocol(self, addr: object) -> ClientReplicationStreamProtocol:
        hs = self._hs
        return ClientReplicationStreamProtocol(hs, "listener", hs.hostname, hs.get_clock(), self._heard)


class Heard(DirectServeJsonResource):
    """In place of the handler of a process: it follows as that one would, by writer of each stream."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens: dict[str, dict[str, int]] = {}
        self._lost = 0

    def new_connection(self, _: object) -> None:
        pass

    def lost_connection(self, _: object) -> None:
        self._lost += 1

    def on_POSITION(self, _: object, said: Any) -> None:
        self._tokens.setdefault(said.stream_name, {})[said.instance_name] = said.new_token

    def on_RDATA(self, _: object, said: Any) -> None:
        STREAMS_MAP[said.stream_name].parse_row(said.row)
        if said.token is not None:
            self._tokens[said.stream_name][said.instance_name] = said.token

    async def _async_render_GET(self, _: object) -> tuple[int, dict[str, Any]]:
        return 200, {"tokens": self._tokens, "lost": self._lost}


class Signatures(DirectServeJsonResource):
    """`POST /_synapse/client/signatures` of a user, at a writer of `device_lists`: the user signs own keys, and changed
    devices are queued for two other servers, as where both are at hand.
    """

    def __init__(self, _: object, api: Any) -> None:
        super().__init__()
        self._hs = api._hs
        api.register_web_resource("/_synapse/client/signatures", self)

    async def _async_render_POST(self, request: Any) -> tuple[int, dict[str, Any]]:
        user, store = parse_json_object_from_request(request)["user"], self._hs.get_datastores().main
        await store.add_user_signature_change_to_streams(user, [user])
        await store.add_device_list_outbound_pokes(user, "PHONE", "!room:one.test", ["one.test", "two.test"], None)
        return 200, {}
