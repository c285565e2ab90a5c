"""Compiles the code that reads and scans records, so that processes of this installation only load it.

    python -m tidemark.app.pipeline.compile_ahead

takes half a minute of a core at most, and almost no time if the code is already compiled.
"""

import sys

from tidemark.streaming.ingest import field_scan, jit_cache, kernels


def main() -> None:
    field_scan.compile_all()
    kernels.compile_all()
    directory = next(jit_cache.cache_dirs())
    if not any(directory.glob("scan-*")):
        sys.exit(f"nothing can be written to {directory}")


if __name__ == "__main__":
    main()
