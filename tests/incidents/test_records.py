"""Records that may not count: of a writer that never joined, of an epoch that is over, and such as break the contract.

`make test` tells these.
"""

import json

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer

from tests.app.running import PATIENCE
from tests.fix_pipeline import PARTITIONS
from tests.incidents.scene import Scene
from tests.incidents.test_blocked import NOTHING, fact
from tests.waiting import eventually
from tidemark.app.cli import main
from tidemark.sources.producer import RecordProducer
from tidemark.streaming.wire.records import Join, Rdata, encode

pytestmark = pytest.mark.slow


def test_a_writer_that_never_joined(scene: Scene) -> None:
    """A second program writes to a stream of the first, and knows nothing of joining."""
    site = scene.site
    with scene.incident("unknown-writer", "TidemarkUnknownWriter", "TidemarkManualOverride") as incident:
        site.send(Join(stream="parcels", writer="depot", epoch=1, id=0), fact("parcels", "depot", 3, 0))
        site.reaches("parcels", linear=3)
        site.send(fact("parcels", "script", 4), fact("parcels", "depot", 5, 3))
        incident.wait_for_alert("TidemarkUnknownWriter")
        said = incident.tidemark("gaps")
        assert "script (epoch 1): has not joined" in said
        then = incident.now()
        done = incident.act(
            "join", "parcels", "script", "--id", "3", "--epoch", "1", "--force", why="ended; it sends no JOIN"
        )
        assert done.splitlines()[-1].startswith("applied")
        site.reaches("parcels", script=4)
        incident.wait_for_alert("TidemarkManualOverride")
        assert "by ada: ended; it sends no JOIN" in incident.tidemark("explain", "parcels", "--at", then)


def test_a_zombie(scene: Scene) -> None:
    """A process that hung is replaced, wakes up, and sends the fact that it had in hand."""
    site = scene.site
    with scene.incident("zombie", "TidemarkDeadLetters") as incident:
        site.send(Join(stream="ledger", writer="w1", epoch=1, id=0), fact("ledger", "w1", 1))
        site.reaches("ledger", linear=1)
        site.send(Join(stream="ledger", writer="w1", epoch=2, id=2))
        site.reaches("ledger", linear=2)
        site.send(fact("ledger", "w1", 2))
        incident.wait_for_alert()
        said = incident.tidemark("dead-letters", "list", "ledger")
        assert "zombie" in said
        offset = said.splitlines()[1].split()[0]
        assert "reason: zombie" in incident.tidemark("dead-letters", "show", offset)
        assert "zombie" in incident.act("dead-letters", "replay", offset, why="is it wanted?", code=1)
        # The old process is ended; the new one goes on.
        site.send(Rdata(stream="ledger", writer="w1", epoch=2, prev=2, id=3, row=NOTHING))
        site.reaches("ledger", linear=3)
        incident.calm()
        assert "zombie" in incident.tidemark("dead-letters", "list", "ledger")


def test_poisoned_records(scene: Scene) -> None:
    """A bridge that was rewritten last week cuts a record short, and takes partitions in turn."""
    site = scene.site
    with scene.incident("poisoned-records", "TidemarkDeadLetters") as incident:
        site.send(Join(stream="visits", writer="bridge", epoch=1, id=0), fact("visits", "bridge", 1))
        site.reaches("visits", linear=1)
        strayed, cut = (encode(fact("visits", "bridge", id)) for id in (2, 3))
        sender = RecordProducer(site.kafka, site.facts, give_up_after=PATIENCE)
        sender.send("visits", cut[:-9])
        sender.deliver(PATIENCE)
        assert sender.last_acknowledged is not None
        elsewhere = Producer(site.kafka.producer_settings())
        elsewhere.produce(
            site.facts, partition=(sender.last_acknowledged[0] + 1) % PARTITIONS, key=b"visits", value=strayed
        )
        assert elsewhere.flush(30) == 0
        incident.wait_for_alert()

        def letters() -> dict[str, str] | None:
            printed = CliRunner(env=site.variables).invoke(main, ["dead-letters", "list", "visits", "--json"]).stdout
            found = {it["reason"]: str(it["offset"]) for it in json.loads(printed)["dead_letters"]}
            return found if len(found) == 2 else None

        offsets = eventually(letters, PATIENCE, lambda: "both letters")
        said = incident.tidemark("dead-letters", "list", "visits")
        assert "not_json" in said
        assert "wrong_partition" in said
        assert "reason: not_json" in incident.tidemark("dead-letters", "show", offsets["not_json"])
        # The bridge is mended, and sends what was cut short again.
        done = incident.act(
            "dead-letters", "replay", offsets["wrong_partition"], why="the bridge partitions by key again"
        )
        assert done.splitlines()[-1] == "applied: bridge is at 2, linear position 2"
        site.send(fact("visits", "bridge", 3))
        site.reaches("visits", linear=3)
        incident.calm()
        incident.tidemark("dead-letters", "list", "visits")
