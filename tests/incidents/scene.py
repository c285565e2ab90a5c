"""The servers and processes of the incidents: a pipeline, a sidecar, a service's database with its relay, and a
Prometheus that scrapes them and has the chart's alerts. All incidents share them, and each repairs what it breaks.
"""

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psycopg
from click.testing import CliRunner

from tests.app.prometheus import Prometheus, scraping
from tests.app.running import PATIENCE, Running
from tests.app.sidecar.given import SidecarClient, sidecar
from tests.fix_pipeline import ROOT, Site
from tests.fix_servers import own_postgres
from tests.helm.tools import alert_rules
from tests.incidents import pages
from tests.incidents.hasty import hastened
from tests.incidents.pages import Entry
from tests.incidents.way import Way
from tests.waiting import eventually
from tidemark.app.cli import main
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.stack.postgres import PostgresServer, postgres_program
from tidemark.app.stack.processes import LOOPBACK, free_port

WRITE = "INCIDENTS_WRITE"
"""The variable that makes the run write the pages again; its name must not look like a setting."""
PIPELINE, SECOND, SIDECAR, RELAY = (
    "tidemark-pipeline-0",
    "tidemark-pipeline-1",
    "tidemark-sidecar-0",
    "tidemark-relay-shop-5f7d-x2x4",
)


@dataclass
class Scene:
    """`shop` is the Postgres of the services: faults of Tidemark's Postgres leave it alone. Only the pipeline connects
    to Postgres through `way`."""

    site: Site
    shop: PostgresServer
    pipeline: Running
    way: Way
    client: SidecarClient
    prometheus: Prometheus
    second_port: int

    @property
    def shop_dsn(self) -> str:
        return self.shop.dsn("shop")

    @contextmanager
    def service(self, name: str = "checkout") -> Iterator[psycopg.Connection]:
        """A session of a service on its database."""
        with psycopg.connect(self.shop_dsn, autocommit=True, application_name=name) as connection:
            yield connection

    def restart(self) -> None:
        """Start the pipeline again, which has ended, where Prometheus looks for it."""
        self.pipeline = started(self.site, self.way, metrics_port=self.pipeline.metrics_port)

    def firing(self) -> set[str]:
        return {found["alertname"] for found in self.prometheus.query('ALERTS{alertstate="firing"}')}

    def append(self, stream: str) -> int:
        """A fact of a service, and its ID."""
        with self.service() as connection:
            row = connection.execute("select tidemark.append(%s, '{}')", [stream]).fetchone()
        assert row is not None
        return int(row[0])

    @contextmanager
    def incident(self, name: str, *alerts: str) -> Iterator["Incident"]:
        """Fail unless exactly these `alerts` fire, and none at the end."""
        eventually(lambda: not self.firing(), PATIENCE, lambda: f"no alert before the incident; {self.firing()} fire")
        incident = Incident(self, name, set(alerts))
        yield incident
        incident.end()


@dataclass
class Incident:
    """The commands that repair one fault, with their output; the page of the incident shows both."""

    scene: Scene
    name: str
    alerts: set[str]
    entries: list[Entry] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    def wait_for_alert(self, alert: str | None = None) -> None:
        """Wait until the alert fires. None: the only alert of the incident."""
        (name,) = self.alerts if alert is None else (alert,)
        eventually(lambda: name in self.scene.firing(), PATIENCE, lambda: f"{name}; {self.scene.firing()} fire")
        found = [it for it in self.scene.prometheus.ask("alerts")["alerts"] if it["labels"]["alertname"] == name]
        said = found[0]["annotations"]
        self.entries.append(
            Entry(
                f"alert: {name}, {found[0]['labels']['severity']}",
                f"{said['summary']}\nfirst: {said['command']}\n{said['action']}",
            )
        )

    def tidemark(self, *words: str, code: int = 0) -> str:
        """What a verb prints."""
        environment = {**self.scene.site.variables, "COLUMNS": "120"}
        done = CliRunner(env=environment).invoke(main, words)
        assert done.exit_code == code, done.output
        self.shown(shlex.join(["tidemark", *words]), done.output)
        return done.output

    def act(self, *words: str, why: str, code: int = 0) -> str:
        return self.tidemark(*words, "--by", "ada", "--why", why, "--yes", code=code)

    def now(self) -> str:
        """For `--at`."""
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def psql(self, dsn: str, query: str) -> str:
        """What Postgres's own program prints."""
        command = [postgres_program("psql"), dsn, "-X", "-c", query]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        self.shown(shlex.join(["psql", "-c", query]), found.stdout)
        return found.stdout

    def shown(self, command: str, printed: str) -> None:
        self.entries.append(Entry(f"$ {self._placed(command)}", self._placed(printed)))

    def ever(self) -> set[str]:
        """The alerts that fired since the incident began."""
        seconds = int(time.time() - self.began) + 1
        query = f'count_over_time(ALERTS{{alertstate="firing"}}[{seconds}s])'
        return {found["alertname"] for found in self.scene.prometheus.query(query)}

    def calm(self) -> None:
        """Wait until no alert fires."""
        eventually(lambda: not self.scene.firing(), 2 * PATIENCE, lambda: f"{self.scene.firing()} fire")

    def end(self) -> None:
        self.calm()
        ever = self.ever()
        assert ever == self.alerts, f"{sorted(ever)} fired, and not {sorted(self.alerts)}"
        path = pages.FOLDER / f"{self.name}.md"
        text = path.read_text()
        if os.environ.get(WRITE):
            text = pages.made_anew(text, self.entries)
            path.write_text(text)
        assert not (wrong := pages.differs(text, self.entries)), wrong

    def _placed(self, text: str) -> str:
        """With the addresses and names of a stack that is installed, for those of this run."""
        site = self.scene.site
        for ours, shown in {
            self.scene.shop_dsn: "postgresql://tidemark@shop-db:5432/shop",
            f"{site.database}.": "tidemark.",
            f"/{site.database}": "/tidemark",
            site.kafka.bootstrap: "kafka:9092",
            f"{LOOPBACK}:{site.postgres.port}": "postgres:5432",
            f'"{LOOPBACK}", port {site.postgres.port}': '"postgres", port 5432',
            f"{LOOPBACK}:{self.scene.shop.port}": "shop-db:5432",
            site.redis_url.removeprefix("redis://").partition("/")[0]: "redis:6379",
            str(site.home): "/var/lib/tidemark",
            str(self.scene.client.base_url).rstrip("/"): "http://sidecar:9480",
        }.items():
            text = text.replace(ours, shown)
        return text


def started(site: Site, way: Way, **changed: object) -> Running:
    dsn = site.dsn.replace(f":{site.postgres.port}/", f":{way.here}/")
    return site.start(module=("tests.incidents.hasty",), owner=PIPELINE, postgres_dsn=dsn, **changed)


@contextmanager
def made_scene(site: Site, home: Path) -> Iterator[Scene]:
    with own_postgres(home / "shop") as shop, Way(site.postgres.port).leading() as way:
        with psycopg.connect(shop.dsn("postgres"), autocommit=True) as connection:
            connection.execute("create database shop")
        pipeline = started(site, way)
        second, relay_port = free_port(), free_port()
        migrated = CliRunner(env=site.variables).invoke(
            main, ["relay", "--dsn", shop.dsn("shop"), "migrate", "--stream", "orders", "--stream", "returns"]
        )
        assert migrated.exit_code == 0, migrated.output
        with (
            relaying(site, shop.dsn("shop"), relay_port, home),
            sidecar(ReadSideConfig(site.redis_url, site.dsn)) as client,
        ):
            pipeline.ready()
            pods = {PIPELINE: pipeline.metrics_port, SIDECAR: client.base_url.port or 0, RELAY: relay_port}
            rules = hastened(alert_rules(bridge=False))
            with scraping(home, rules, pods, {SECOND: second}) as prometheus, asking(client):
                yield Scene(site, shop, pipeline, way, client, prometheus, second)


@contextmanager
def asking(client: SidecarClient) -> Iterator[None]:
    """A reader, who asks the sidecar twice a second, whatever it answers; that asks Postgres of what Redis lacks."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.5):
            for stream in ("orders", "unheard_of"):
                client.get(f"/v1/streams/{stream}")

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def relaying(site: Site, dsn: str, port: int, home: Path) -> Iterator[None]:
    """`tidemark relay` beside the services' database."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("TIDEMARK_")}
    words = ["relay", "--dsn", dsn, "--writer", "shop", "--metrics", f"{LOOPBACK}:{port}"]
    with (home / "relay.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tidemark.app.cli", *words],
            stdout=log,
            stderr=log,
            cwd=home,
            env={**clean, **site.variables, "PYTHONPATH": str(ROOT)},
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)
