"""Who gives way where every place is taken."""

from tidemark.app.crowd import Waiting, crowding


def test_the_oldest_of_whoever_has_most_give_way() -> None:
    """One where there are few places; some at once where there are many, so that a crowd that goes on coming costs
    little each time. Others are left alone, however old they are."""
    crowd = [Waiting(number, "crowd", float(-number)) for number in range(1000)]
    others = [Waiting(-number, f"other {number}", -9999.0) for number in range(1, 100)]
    waiting = [*others, *crowd]
    assert crowding(waiting, 20) == [999]
    assert crowding(waiting, 640) == [*range(999, 989, -1)]
    assert crowding(waiting, 10**6) == [*range(999, -1, -1)]
    assert crowding([], 20) == []
