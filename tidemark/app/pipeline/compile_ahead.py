"""Compiles the functions that scan records, and stores the code for all processes of this installation.

Run: python -m tidemark.app.pipeline.compile_ahead. The command needs up to half a minute of CPU time, and almost none
if the compiled code exists already.
"""

import sys

from tidemark.streaming.ingest import field_scan, jit_cache, kernels


def main() -> None:
    """Compile the functions. Exits with an error text if the compiled code could not be written to its directory."""
    field_scan.compile_all()
    kernels.compile_all()
    directory = next(jit_cache.cache_dirs())
    if not any(directory.glob("scan-*")):
        sys.exit(f"the compiled code could not be written to {directory}; make the directory writable")


if __name__ == "__main__":
    main()
