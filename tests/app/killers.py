"""The pipeline, but it kills itself with SIGKILL just before one step of one batch: for tests of what a crash leaves.

    python -m tests.app.killers STEP BATCH pipeline ...

STEP is `commit`, `show` or `bury` of `sinks.publisher.Publisher`, or `end`: after all of them, before Spark is told.
BATCH counts from 1 in the life of this process.
"""

import itertools
import os
import signal
import sys
from typing import Any

from app.cli import main
from sinks.publisher import Publisher


def die_before(step: str, batch: int) -> None:
    """Replace `step` by one that works until it is called for the time that is named `batch`."""
    name = "bury" if step == "end" else step
    proper = getattr(Publisher, name)
    calls = itertools.count(1)

    def deadly(self: Publisher, *arguments: Any) -> Any:
        its_time = next(calls) == batch
        if its_time and step != "end":
            os.kill(os.getpid(), signal.SIGKILL)
        result = proper(self, *arguments)
        if its_time:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(Publisher, name, deadly)


if __name__ == "__main__":
    _, step, batch, *arguments = sys.argv
    die_before(step, int(batch))
    main(arguments)
