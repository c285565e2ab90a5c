"""The memory of a relay that has the worst to carry that the functions let through, against the limit of the chart."""

import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import structlog
import yaml

from tests.fix_servers import away
from tests.sources.relay.running import append, settled
from tests.waiting import eventually
from tidemark.app.stack.processes import KafkaServer
from tidemark.common.environment import child_environment

pytestmark = pytest.mark.slow

log = structlog.get_logger(__name__)

LARGE = "select tidemark.append('orders', variadic (select array_agg(to_jsonb(%s::text)) from generate_series(1, 18)))"
MANY = "select tidemark.append('orders', variadic (select array_agg('{}'::jsonb) from generate_series(1, 83000)))"
SMALL = "select tidemark.append_many('orders', array_agg('{}'::jsonb)) from generate_series(1, 100000)"
TEXT = "\N{WATER WAVE}" + "x" * 899_000
HEADROOM = 1.25


def peak_bytes(process: subprocess.Popen[bytes]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def chart_limit() -> int:
    """Bytes."""
    values = yaml.safe_load(Path("helm/tidemark/values.yaml").read_text())
    text = values["relay"]["defaults"]["resources"]["limits"]["memory"]
    assert text.endswith("Mi")
    return int(text.removesuffix("Mi")) * 2**20


def test_the_largest_facts_fit_into_the_memory_of_the_chart(
    ready: str, sql: psycopg.Connection, kafka: KafkaServer, topic: str
) -> None:
    """Facts of 16 MiB in few rows and in as many as there may be, and 100 000 small ones, gather while Kafka is away;
    all are sent when it is back."""
    settings = {
        "TIDEMARK_POSTGRES_DSN": ready,
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "TIDEMARK_KAFKA_FACTS_TOPIC": topic,
    }
    command = [sys.executable, "-m", "tidemark", "relay"]
    peaks = dict[str, int]()
    with subprocess.Popen(command, env=child_environment(settings)) as process:
        try:
            append(sql)
            eventually(lambda: settled(sql))
            peaks["idle"] = peak_bytes(process)
            for name, statements in (("many rows", [MANY] * 3), ("large rows", [LARGE] * 3 + [SMALL])):
                with away(kafka):
                    for statement in statements:
                        sql.execute(statement.encode(), [TEXT] if statement == LARGE else [])
                eventually(lambda: settled(sql), 180)
                peaks[name] = peak_bytes(process)
        finally:
            process.terminate()
        assert process.wait(60) == 0
    assert max(peaks.values()) * HEADROOM < chart_limit(), peaks
    log.info("Peaks in MiB", **{name: value >> 20 for name, value in peaks.items()})
