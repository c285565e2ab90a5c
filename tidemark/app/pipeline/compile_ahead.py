"""Compiles the code that reads and scans records, so that processes of this installation need not compile it.

    python -m tidemark.app.pipeline.compile_ahead

needs up to half a minute of CPU time, and almost none if the code is already compiled.
"""

import sys

from tidemark.streaming.ingest import field_scan, jit_cache, kernels


def main() -> None:
    field_scan.compile_all()
    kernels.compile_all()
    directory = next(jit_cache.cache_dirs())
    if not any(directory.glob("scan-*")):
        sys.exit(f"the compiled code could not be written to {directory}; make the directory writable")


if __name__ == "__main__":
    main()
