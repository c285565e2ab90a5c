"""What may be seen on stderr besides lines of ours: nothing."""

import socket
import struct
import subprocess
import sys
from threading import Thread

_ASK = """
import sys
from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JError
from tidemark.app import logs
from tidemark.app.settings import Settings

logs.configure(Settings())
try:
    JavaGateway(gateway_parameters=GatewayParameters(port=int(sys.argv[1]))).jvm.System.currentTimeMillis()
except Py4JError:
    print("told")
"""


def test_connection_that_the_jvm_resets_is_told_by_an_exception_alone() -> None:
    """py4j logs a lost connection with its stack trace, and also raises: only the exception counts."""
    with socket.create_server(("127.0.0.1", 0)) as jvm:

        def reset() -> None:
            while True:
                try:
                    connection, _ = jvm.accept()
                except OSError:
                    return  # the test has ended
                connection.recv(1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

        Thread(target=reset, daemon=True).start()
        asked = subprocess.run(
            [sys.executable, "-c", _ASK, str(jvm.getsockname()[1])],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        jvm.shutdown(socket.SHUT_RDWR)
    assert (asked.stdout, asked.stderr) == ("told\n", "")
