"""The pipeline, but it kills itself with SIGKILL just before one step of one batch: for tests of what a crash leaves.

    python -m tests.app.killers STEP BATCH pipeline ...

STEP is `commit`, `show` or `bury` of `sinks.publisher.Publisher`. BATCH counts from 1 in the life of this process.
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
    proper = getattr(Publisher, step)
    calls = itertools.count(1)

    def deadly(self: Publisher, *arguments: Any) -> Any:
        if next(calls) == batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return proper(self, *arguments)

    setattr(Publisher, step, deadly)


if __name__ == "__main__":
    _, step, batch, *arguments = sys.argv
    die_before(step, int(batch))
    main(arguments)
