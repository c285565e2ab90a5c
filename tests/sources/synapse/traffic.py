"""What users of a Synapse do beside sending messages: something for each stream that the bridge tells."""

import secrets
from collections.abc import Sequence

from tests.services.synapse import NAME
from tests.sources.synapse.site import SynapseSite

KINDS = 12


def act(site: SynapseSite, rooms: Sequence[str], number: int, at: Sequence[str]) -> None:
    """One of `KINDS` things, through the workers that write it: `at` are those of receipts and device lists, the first
    also of the rest."""
    server, room, user = site.server, rooms[number % len(rooms)], "alice"
    me, text, one, any_one = f"@{user}:{NAME}", {"n": number}, at[0], at[number % len(at)]
    match number % KINDS:
        case 0:
            server.client("PUT", f"/user/{me}/account_data/org.test.{number % 5}", user, text, one)
        case 1:
            server.client("PUT", f"/user/{me}/rooms/{room}/account_data/org.test.r", user, text, one)
        case 2:
            messages = {"messages": {me: {server.device(user): text}}}
            server.client("PUT", f"/sendToDevice/org.test/{secrets.token_hex(8)}", user, messages, one)
        case 3:
            event = server.send(room, user, "to be read")
            server.client("POST", f"/rooms/{room}/receipt/m.read/{event}", user, {}, any_one)
        case 4:
            body = {"presence": "online", "status_msg": str(number)}
            server.client("PUT", f"/presence/{me}/status", user, body, one)
        case 5:
            rule = {"pattern": str(number), "actions": ["notify"]}
            server.client("PUT", f"/pushrules/global/content/r{number % 9}", user, rule, one)
        case 6:
            server.client("PUT", f"/rooms/{room}/state/org.test/{number % 7}", user, text, "event1")
        case 7:
            server.client("PUT", f"/devices/{server.device(user)}", user, {"display_name": f"phone {number}"})
        case 8:
            device = server.device(user)
            keys = {"user_id": me, "device_id": device, "algorithms": [], "keys": {f"ed25519:{device}": str(number)}}
            server.client("POST", "/keys/upload", user, {"device_keys": {**keys, "signatures": {}}}, any_one)
        case 9:
            server.call(any_one, "POST", "/_synapse/client/signatures", user, {"user": me})
        case 10:
            server.backfill(room, user, 1 + number % 3)
        case 11:
            server.backfill(room, user, 1, outlier=True)
