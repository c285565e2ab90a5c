"""The pipeline, but it sends itself a signal just before one step of one batch: for tests of crashes and of stalls.

    python -m tests.app.killers SIGKILL commit 3 pipeline ...

The step is `commit`, `publish_to_sink` or `dead_letter` of `sinks.publisher.Publisher`, or `requeue` (`step` of
`sinks.dead_letters.Requeuer`), each of which counts as a batch; the batch counts from 1 in this process.
"""

import itertools
import signal
import sys
import threading
from typing import Any

from tidemark.app.cli import main
from tidemark.sinks.dead_letters import Requeuer
from tidemark.sinks.publisher import Publisher


def strike(number: signal.Signals, step: str, batch: int) -> None:
    """Replace `step` by one that does the same, but raises the signal first when it is called for the `batch`th time.

    What the signal leaves alive goes on with the step.
    """
    owner, method = (Requeuer, "step") if step == "requeue" else (Publisher, step)
    proper = getattr(owner, method)
    calls = itertools.count(1)

    def struck(self: object, *arguments: Any) -> Any:
        if next(calls) == batch:
            # To this thread: one that is sent to the process may be taken by another, while this one goes on.
            signal.pthread_kill(threading.get_ident(), number)
        return proper(self, *arguments)

    setattr(owner, method, struck)


if __name__ == "__main__":
    _, name, step, batch, *arguments = sys.argv
    strike(signal.Signals[name], step, int(batch))
    main(arguments)
