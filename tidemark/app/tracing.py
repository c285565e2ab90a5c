"""What is told of a batch to whoever collects traces: nothing, unless there is an endpoint (`app.otlp`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, TypeAlias

from tidemark.common.errors import ExtraMissing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tidemark.sinks.publisher import Published
    from tidemark.streaming.core.effects import ShardEffects


class BatchTrace:
    """Of one attempt at one batch. The calls come in this order, the last ones not where it fails."""

    def computed(self, batch: "DataFrame", effects: "Sequence[ShardEffects]") -> None:
        """Spark has read the records, and advanced the states."""

    def published(self, published: "Published") -> None:
        """All sinks have it, and its dead letters are sent."""


Trace: TypeAlias = Callable[[str, int], AbstractContextManager[BatchTrace]]
"""Query and number of the batch that is in hand as long as the block runs; what is raised there is told too."""


def untraced(_query: str, _number: int) -> AbstractContextManager[BatchTrace]:
    return nullcontext(_NOTHING)


_NOTHING: Final = BatchTrace()


@contextmanager
def tracing(endpoint: str | None, owner: str, token: int) -> Iterator[Trace]:
    """For whoever collects at `endpoint`, from the owner of the lease with that fencing token; nobody for None.

    Raises ExtraMissing.
    """
    if endpoint is None:
        yield untraced
        return
    try:
        from tidemark.app.otlp import collector
    except ModuleNotFoundError as error:
        raise ExtraMissing.instead_of(error, "TIDEMARK_OTLP_URL", "otel") from None
    with collector(endpoint, owner, token) as found:
        yield found
