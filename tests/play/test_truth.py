"""The oracle against the definitions, worked out by hand."""

from tests.play.truth import StreamTruth


def test_the_worked_example_of_the_design() -> None:
    """One writer at 1: 3 before 2 jumps to 3; 5 before 4 jumps to 5, and 6 in flight holds nothing back."""
    truth = StreamTruth()
    truth.joined("A", 1)

    def position_after(id_: int) -> int:
        truth.completed("A", id_)
        assert truth.linear() == truth.positions()["A"]
        return truth.linear()

    truth.reserved("A", 2)
    truth.reserved("A", 3)
    assert [position_after(3), position_after(2)] == [1, 3]
    for id_ in (4, 5, 6):
        truth.reserved("A", id_)
    assert [position_after(5), position_after(4), position_after(6)] == [3, 5, 6]


def test_an_idle_writer_holds_the_line_until_it_announces() -> None:
    """A completes up to 3 while B says nothing: A's IDs carry the line, but nothing behind them that nobody owns."""
    truth = StreamTruth()
    truth.joined("A", 0)
    truth.joined("B", 0)
    truth.reserved("A", 1)
    truth.completed("A", 1)
    truth.announced("A", 3)
    assert truth.positions() == {"A": 3, "B": 0}
    assert truth.linear() == 1
    truth.announced("B", 3)
    assert truth.linear() == 3


def test_an_announced_id_of_another_writer_does_not_complete_it() -> None:
    """B announces 5 while A's 5 is in flight: B's position moves and the line does not."""
    truth = StreamTruth()
    truth.joined("A", 4)
    truth.joined("B", 4)
    truth.reserved("A", 5)
    truth.announced("B", 5)
    assert truth.positions() == {"A": 4, "B": 5}
    assert truth.linear() == 4


def test_a_join_settles_what_the_epoch_before_left_open() -> None:
    """2 was told before the crash, 1 and 3 never were: all three are behind the position once the writer joins at 3."""
    truth = StreamTruth()
    truth.joined("A", 0)
    for id_ in (1, 2, 3):
        truth.reserved("A", id_)
    truth.completed("A", 2)
    assert truth.linear() == 0
    truth.joined("A", 3)
    assert (truth.linear(), truth.positions()) == (3, {"A": 3})


def test_a_retired_writer_holds_nothing_back_and_the_last_one_takes_the_line_along() -> None:
    """While B lives its position counts; when all have retired the line goes to the highest that anyone reached."""
    truth = StreamTruth()
    truth.joined("A", 0)
    truth.joined("B", 0)
    truth.retired("A", 2)
    assert truth.linear() == 0
    truth.retired("B", 1)
    assert (truth.linear(), truth.positions()) == (2, {"A": 2, "B": 1})
