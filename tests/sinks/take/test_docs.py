"""The statement of docs/how-to/read-in-any-language.md that undoes effects after a restore of another database."""

import random
import re
from pathlib import Path

import psycopg
import pytest

from tests.sinks.take.given import Positioned

PAGE = Path("docs/how-to/read-in-any-language.md").read_text()
(UNDO,) = re.findall(r"^(DELETE FROM invoices .*?;)", PAGE, re.MULTILINE | re.DOTALL)
(INVOICES,) = re.findall(r"^(CREATE TABLE invoices .*?;)", PAGE, re.MULTILINE | re.DOTALL)
RESTORED = "web"


class Billing:
    """The orders of two writers in two databases, and the reader of the page, which writes an invoice for each."""

    def __init__(self, readers: Positioned, chance: random.Random) -> None:
        readers.sql.execute("drop table if exists orders, invoices; create table orders (stream_id bigint, total int)")
        readers.sql.execute(INVOICES.encode())
        self.readers = readers
        self.chance = chance
        self.writers = dict[int, str]()
        """By ID, the writer that it was given out to."""
        self.settled = set[int]()
        self.late = 0
        self.withdrawn = 0

    def write(self) -> None:
        """Some of the IDs are settled by an operator before their transactions end."""
        for _ in range(self.chance.randint(1, 5)):
            id = len(self.writers) + 1
            self.writers[id] = self.chance.choice([RESTORED, "till"])
            if self.chance.random() < 0.7:
                self._order(id)
            else:
                self.settled.add(id)
        self.readers.publish(len(self.writers))

    def commit_late(self) -> None:
        if self.settled:
            id = self.chance.choice(sorted(self.settled))
            self.settled.remove(id)
            self._order(id)
            self._publish_late(self.writers[id], id - 1, id, 1, "skipped")

    def restore(self) -> None:
        """The IDs of one writer beyond the backup are given out again. The reader may read before all of that is
        published."""
        backup = self.chance.randint(0, len(self.writers))
        ids = [id for id, writer in self.writers.items() if writer == RESTORED and id > backup]
        self.settled -= {*ids}
        self.readers.sql.execute("delete from orders where stream_id = any (%s)", [ids])
        facts = [id for id in ids if self.chance.random() < 0.5]
        for id in facts:
            self._order(id)
        reached = backup
        for id in ids:
            if id in facts:
                if reached < id - 1:
                    self._publish_late(RESTORED, reached, id - 1, 0, "regressed")
                self._publish_late(RESTORED, id - 1, id, 1, "regressed")
                reached = id
        if ids and reached < ids[-1]:
            self._publish_late(RESTORED, reached, ids[-1], 0, "regressed")

    def read(self) -> bool:
        """Returns whether there was something to read. A third of the transactions is rolled back."""
        most = self.chance.randint(1, 8)
        with self.readers.sql.transaction(force_rollback=self.chance.random() < 1 / 3):
            rows = self.readers.columns("low, high, late, withdrawn", "take", "orders", "billing", most=most)
            for low, high, late, withdrawn in rows:
                undone = psycopg.RawCursor(self.readers.sql).execute(UNDO.encode(), [withdrawn, late]).rowcount
                self.withdrawn += undone
                self.readers.sql.execute(
                    "insert into invoices (stream_id, total) select stream_id, total from orders"
                    " where stream_id > %s and stream_id <= %s or stream_id = any (%s) order by stream_id",
                    [low, high, late],
                )
        return rows != []

    def rows(self, table: str) -> list[tuple[int, int]]:
        return self.readers.sql.execute(f"select stream_id, total from {table} order by 1".encode()).fetchall()

    def _order(self, id: int) -> None:
        self.readers.sql.execute("insert into orders values (%s, %s)", [id, self.chance.randrange(1000)])

    def _publish_late(self, writer: str, prev: int, id: int, facts: int, why: str) -> None:
        self.late += 1
        self.readers.late(self.late, prev, id, facts, writer, why)
        if why == "regressed" and self.chance.random() < 0.2:
            self.read()


@pytest.mark.parametrize("seed", range(6))
def test_invoices_are_those_of_the_orders_after_restores(readers: Positioned, seed: int) -> None:
    """One writer's database is restored again and again, and facts come late: each order has one invoice, and no other
    order has any."""
    chance = random.Random(seed)
    billing = Billing(readers, chance)
    billing.write()
    for _ in range(80):
        acts = [billing.write, billing.commit_late, billing.restore, billing.read]
        chance.choices(acts, [3, 2, 1, 3])[0]()
    while billing.read():
        pass
    assert billing.rows("invoices") == billing.rows("orders")
    assert billing.withdrawn > 0
