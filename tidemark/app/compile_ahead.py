"""Compile the code that reads and scans records, for all who use this installation: they only load it.

    python -m tidemark.app.compile_ahead

takes half a minute of a core at most, and as good as nothing where that is done.
"""

import sys

from tidemark.streaming.ingest import field_scan, jit_cache, kernels


def main() -> None:
    field_scan.compile_all()
    kernels.compile_all()
    place = next(jit_cache.places())
    if not any(place.glob("scan-*")):
        sys.exit(f"nothing can be written to {place}")


if __name__ == "__main__":
    main()
