"""The page in docs/ shows what works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg

from tidemark.app.stack.servers import KafkaServer
from tidemark.app.writer import migrate
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import TopicPlan, Topics


def test_the_example_runs_as_it_stands(database: str, kafka: KafkaServer) -> None:
    """After `tidemark writer migrate` as the page has it: three orders are written, and nothing waits in the outbox."""
    (example,) = re.findall(r"```python\n(.*?)```", Path("docs/writer.md").read_text(), re.DOTALL)
    Topics(KafkaConnection(kafka.bootstrap_servers)).create_missing([TopicPlan("tidemark.facts", 1, 3_600_000)])
    said: list[str] = []
    migrate(database, ["orders_id_seq"], "forward", said.append)
    assert said == ["applied 1, 2, 3", "made sequence orders_id_seq"]
    environment = {**os.environ, "SHOP_DSN": database, "SHOP_KAFKA": kafka.bootstrap_servers}
    subprocess.run([sys.executable, "-c", example], env=environment, check=True, timeout=60, stdout=subprocess.DEVNULL)
    with psycopg.connect(database) as sql:
        assert sql.execute("select id, total from orders order by id").fetchall() == [(1, 40), (2, 7), (3, 7)]
        assert sql.execute("select last_value from orders_id_seq").fetchone() == (4,)
        assert sql.execute("select count(*) from tidemark.outbox").fetchone() == (0,)
