"""Compile the code that reads and scans records, for all who use this installation: they only load it.

    python -m tidemark.app.compile_ahead

takes half a minute of a core at most, and as good as nothing where that is done.
"""

import sys

import numpy as np

from tidemark.streaming.ingest import jit_cache as compiled
from tidemark.streaming.ingest import kernels as memory
from tidemark.streaming.ingest.decode import Decoder
from tidemark.streaming.ingest.edges import Edges
from tidemark.streaming.ingest.kernels import arrange
from tidemark.streaming.ingest.record_batch import Fetched
from tidemark.streaming.wire.records import Topic


def main() -> None:
    zero, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
    Decoder(Topic.FACTS).add(Fetched.of([b""], [b" " * Decoder.FEW], zero, zero))
    arrange(Edges.room(0), Edges.room(0), np.zeros(2, np.int64), Edges.room(1))
    memory.gather(none, none, 0)
    memory.times(0, none, none)
    memory.release(0, none)
    place = next(compiled.places())
    if not any(place.glob("scan-*")):
        sys.exit(f"nothing can be written to {place}")


if __name__ == "__main__":
    main()
