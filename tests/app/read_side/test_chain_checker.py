"""The chain checker: lists of advances that keep the rules have no fault, and each kind of fault is told once."""

import pytest

from tidemark.app.read_side.metrics import ChainChecker, ChainFault
from tidemark.sinks.reader.requests import ListEntry, ReadList, ReadNewest, StreamKeys


def entry(number: int, prev: int, id: int, writer: str = "w", **evidence: int) -> ListEntry:
    counts = {"facts": 0, "empty": 0, "unseen": 0, "skipped": 0} | (evidence or {"facts": 1})
    fields = {"kind": "POSITION", "writer": writer, "prev": prev, "id": id} | counts
    return ListEntry(f"{number}-0", {name: str(value) for name, value in fields.items()})


class ReadProgram:
    """A list that is read on and on."""

    def __init__(self) -> None:
        self.checker = ChainChecker()
        self.last: ListEntry | None = None

    def on(self, *entries: ListEntry, linear: int = 0, joined: bool = True) -> list[ChainFault]:
        found = StreamKeys(linear, {}, entries=entries, is_continuous=joined, last_entry_name="9-9")
        faults = [*self.checker.check(ReadList("s", self.last), found)]
        self.last = entries[-1] if entries else self.last
        return faults

    def anew(self) -> None:
        self.last = None


@pytest.mark.parametrize("sign", [1, -1])
def test_a_chain_that_joins_has_no_fault(sign: int) -> None:
    """Of several writers, over several readings, in either direction; who was not seen before begins anywhere."""
    reading = ReadProgram()
    assert reading.on(entry(1, 0, 3 * sign), entry(2, 0, 4 * sign, "v"), linear=3 * sign) == []
    more = entry(3, 3 * sign, 9 * sign, empty=6), entry(4, 70 * sign, 71 * sign, "new")
    assert reading.on(*more, linear=4 * sign) == []
    assert reading.on(entry(5, 4 * sign, 10 * sign, "v", skipped=1), linear=9 * sign) == []
    assert reading.on(linear=9 * sign) == []


@pytest.mark.parametrize(
    ("prev", "id", "kind"),
    [(5, 7, "hole"), (2, 7, "overlap"), (1, 3, "regress"), (1, 2, "regress"), (3, 3, "empty"), (3, 2, "empty")],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_each_kind_of_fault_is_told_once(prev: int, id: int, kind: str, sign: int) -> None:
    """The writer stands at 3. Then the chain goes on from the farthest that was seen."""
    reading = ReadProgram()
    reading.on(entry(1, 0, 3 * sign), linear=sign)
    [fault] = reading.on(entry(2, prev * sign, id * sign), linear=sign)
    assert (fault.kind, fault.writer, fault.position_before, fault.entry_name) == (kind, "w", 3 * sign, "2-0")
    farthest = max(id, 3) * sign
    assert reading.on(entry(3, farthest, farthest + sign), linear=sign) == []


def test_an_advance_without_evidence_is_a_fault() -> None:
    """Rule 1: nothing settles IDs but evidence."""
    assert [it.kind for it in ReadProgram().on(entry(1, 0, 3, facts=0))] == ["empty"]


def test_a_line_that_goes_back_is_told_once() -> None:
    """What Postgres tells while Redis is away is no measure: Redis may be behind it for a while."""
    reading = ReadProgram()
    reading.on(entry(1, 0, 9), linear=9)
    assert [(it.kind, it.writer, it.id) for it in reading.on(linear=7)] == [("regress", None, 7)]
    assert reading.on(linear=7) == []
    told_by_postgres = StreamKeys(20, {"w": 20})
    assert [*reading.checker.check(ReadList("s", reading.last), told_by_postgres)] == []
    assert reading.on(linear=8) == []


def test_a_list_that_began_anew_is_no_fault() -> None:
    """It holds what was seen already; so does one whose last entry was cut off, and a reading of the newest alone."""
    reading = ReadProgram()
    reading.on(entry(1, 0, 3), entry(2, 3, 9))
    assert reading.on(joined=False) == []
    reading.anew()
    assert reading.on(entry(5, 0, 3), entry(6, 3, 9)) == []
    newest = StreamKeys(9, {}, entries=[entry(8, 40, 41)], last_entry_name="8-0")
    assert [*reading.checker.check(ReadNewest("s"), newest)] == []
