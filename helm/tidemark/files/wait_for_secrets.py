"""First program of a hook's container: wait for the files of the Secrets, then run the program after `--`.

Each argument before `--` is a file and what to say if it is missing: path=text. The Secrets of the volume are optional,
so that the container starts without them: a pod that waits for its volume has no log.
"""

import os
import sys
import time
from pathlib import Path

# Kubernetes brings a new Secret into the volume of a running pod within about a minute.
SECONDS = float(os.environ.get("SECRETS_SECONDS", "90"))

separator = sys.argv.index("--")
expected = dict(argument.split("=", 1) for argument in sys.argv[1:separator])
program = sys.argv[separator + 1 :]
deadline = time.monotonic() + SECONDS
while missing := [text for path, text in expected.items() if not Path(path).exists()]:
    if time.monotonic() > deadline:
        sys.exit("\n".join(missing))
    time.sleep(1)
os.execvp(program[0], program)
