"""A Prometheus of the tests' own, where the machine has one (Debian's package `prometheus`)."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from tests.waiting import eventually
from tidemark.app.stack.processes import LOOPBACK, free_port

IS_THERE = shutil.which("prometheus") is not None


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, path: str, **params: str) -> Any:
        """The data of an answer; an AssertionError with Prometheus's own words for one that it refuses."""
        try:
            with urlopen(f"{self.url}/api/v1/{path}?{urlencode(params)}", timeout=10) as response:
                return json.load(response)["data"]
        except HTTPError as refused:
            raise AssertionError(f"{params}: {refused.read().decode()}") from None

    def query(self, expression: str) -> list[Mapping[str, str]]:
        """The labels of each series that it gives now."""
        return [found["metric"] for found in self.ask("query", query=expression)["result"]]


@contextmanager
def scraping(
    home: Path, rules: str, targets: Mapping[str, int], later: Mapping[str, int] | None = None
) -> Iterator[Prometheus]:
    """One that asks each second, in the namespace `streams`, the ports of `targets`, by the names of their pods; and
    those of `later`, where nothing listens yet."""
    (home / "rules.yaml").write_text(rules)
    static = [
        {"targets": [f"{LOOPBACK}:{port}"], "labels": {"namespace": "streams", "pod": pod}}
        for pod, port in {**targets, **(later or {})}.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "tidemark", "static_configs": static}],
    }
    (home / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"{LOOPBACK}:{free_port()}"
    with (home / "log").open("wb") as log:
        process = Popen(
            [
                "prometheus",
                f"--config.file={home / 'prometheus.yaml'}",
                f"--storage.tsdb.path={home / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        found = Prometheus(f"http://{address}")

        def scraped() -> bool:
            assert process.poll() is None, (home / "log").read_text()
            try:
                with urlopen(f"http://{address}/-/ready", timeout=10):
                    pass
            except URLError:  # also while it answers that it is not
                return False
            return len(found.query("count_over_time(up[1m]) >= 4 and up == 1")) == len(targets)

        eventually(scraped, 60, lambda: f"every target:\n{(home / 'log').read_text()}")
        yield found
    finally:
        process.kill()
        process.wait()
