"""The order of stream IDs: away from 0, so that the IDs of a backward stream (-1, -2, ...) ascend too. Pure."""


def beyond(a: int, b: int) -> bool:
    """Whether `a` comes after `b`."""
    return abs(a) > abs(b)


def farther(a: int, b: int) -> int:
    return a if beyond(a, b) else b


def nearer(a: int, b: int) -> int:
    return b if beyond(a, b) else a
