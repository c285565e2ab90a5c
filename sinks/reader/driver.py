"""Holds a program between its steps, for the shells that carry them out. No sockets."""

from collections.abc import Generator
from typing import Generic, TypeVar

from tidemark.sinks.reader.asks import Answer, Ask
from tidemark.streaming.errors import Unavailable

R = TypeVar("R")


class Driver(Generic[R]):
    """`step` is what the program asks for or hands over now; it stays until the shell says what came of it.

    So a shell that was interrupted in the middle of an ask carries it out again.
    """

    def __init__(self, program: Generator[Ask | R, Answer, None]) -> None:
        self._program = program
        self._step: Ask | R | None = None

    def step(self) -> Ask | R | None:
        """None: the program is over. Raises what the program raises; it is over then."""
        if self._step is None:
            self._step = next(self._program, None)
        return self._step

    def handed_over(self) -> None:
        self._step = None

    def answered(self, answer: Answer) -> None:
        self._step = None
        self._step = self._program.send(answer)

    def failed(self, problem: Unavailable) -> None:
        self._step = None
        self._step = self._program.throw(problem)
