"""Cuts what a connection brings into lines, and holds the beginning of one that is not there in full. Pure."""

from collections.abc import Iterator

from tidemark.streaming.errors import BadCommand


class Splitter:
    """`longest` is how many bytes a line may have without its newline; no more than that is ever held."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._begun = b""

    def lines(self, data: bytes) -> Iterator[bytes]:
        """The lines that `data` ends, without their newlines. Raises `BadCommand` for one that is too long: what comes
        after it cannot be told from it, so the connection is of no use any more. Take all lines before the next call.
        """
        *whole, last = data.split(b"\n")
        for line in whole:
            begun, self._begun = self._begun, b""
            yield self._within(begun + line)
        self._begun = self._within(self._begun + last)

    def _within(self, line: bytes) -> bytes:
        if len(line) > self._longest:
            raise BadCommand(f"a line is longer than {self._longest} bytes")
        return line
