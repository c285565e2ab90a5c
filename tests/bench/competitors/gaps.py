"""A writer's position from its edges, one record at a time: the tracker that one writes by hand. Pure."""

from typing import Any

Writer = tuple[str, str]


class GapBuffer:
    """Positions of all writers; edges that came early wait in a dict by their `prev`."""

    def __init__(self) -> None:
        self.positions: dict[Writer, int] = {}
        self._waiting: dict[Writer, dict[int, int]] = {}

    def add(self, record: dict[str, Any]) -> None:
        writer = record["stream"], record["writer"]
        if record["kind"] == "JOIN":
            self.positions[writer] = record["id"]
            self._waiting[writer] = {}
            return
        position, waiting = record["id"], self._waiting[writer]
        if record["prev"] != self.positions[writer]:
            waiting[record["prev"]] = position
            return
        while waiting and (following := waiting.pop(position, None)) is not None:
            position = following
        self.positions[writer] = position
