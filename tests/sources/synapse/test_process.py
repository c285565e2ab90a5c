"""A process of Synapse that does not start."""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.services.synapse import SynapseProcess
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import LOOPBACK, StartFailed

ENDS = """
import sys
print("Traceback (most recent call last):", *["a line"] * 30, "There may be more information in the logs.", sep="\\n")
sys.exit(1)
"""


class _Another(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_another_server_at_its_port_is_not_taken_for_it(tmp_path: Path) -> None:
    """It ends, as one does whose port is taken, and all that it said is told."""
    with ThreadingHTTPServer((LOOPBACK, 0), _Another) as another:
        Thread(target=another.serve_forever, daemon=True).start()
        process = SynapseProcess(Home(tmp_path), "event1", [sys.executable, "-c", ENDS])
        process.port = another.server_port
        with pytest.raises(StartFailed) as failed:
            process.start()
        another.shutdown()
    assert "event1 did not start: it ended with code 1" in str(failed.value)
    assert "Traceback" in str(failed.value)
