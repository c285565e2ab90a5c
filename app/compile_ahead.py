"""Compile the code that scans records, for all who use this installation: they only load it.

    python -m tidemark.app.compile_ahead

takes half a minute of a core at most, and as good as nothing where that is done.
"""

import sys

import numpy as np

from tidemark.streaming import compiled
from tidemark.streaming.decode import Decoder
from tidemark.streaming.fetched import Fetched
from tidemark.streaming.records import Topic


def main() -> None:
    zero = np.zeros(1, np.int64)
    Decoder(Topic.FACTS).add(Fetched.of([b""], [b" " * Decoder.FEW], zero, zero))
    if compiled.KEPT is None or compiled.KEPT.parent != compiled.INSTALLATION:
        sys.exit(f"nothing can be written to {compiled.INSTALLATION}")
    for file in compiled.KEPT.iterdir():
        file.chmod(0o644)
    compiled.KEPT.chmod(0o755)


if __name__ == "__main__":
    main()
