"""`make kube-test`: Tidemark on the current cluster, installed, broken, upgraded: what is published against the truth.

Run as `python -m tests.helm.cluster`. Builds the images and stand-ins for the trial's servers, loads them, installs the
trial, and lets facts flow while pods die and releases change. Redis and sidecars are watched all the time: nothing that
either says may be beyond what was sent by then, and a gap that is open stays so, with its age, through everything.
Prints its figures; ends with 1 at the first thing that is wrong, and leaves the release for you to look at.
"""

import itertools
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from tests.helm import installs
from tests.helm.faults import Faults, say, timed
from tests.helm.feed import FactsFeed
from tests.helm.kube import Kube, until
from tests.helm.tools import CHART, ROOT, run
from tests.helm.tutorial import Tutorial
from tests.helm.watch import PositionsWatch

IMAGE = "localhost/tidemark:dev"
SERVICES_IMAGE = "localhost/tidemark-services:dev"
NEXT_IMAGE = "localhost/tidemark:next"
SERVERS = "localhost/tidemark-servers:dev"
SERVER_IMAGES = [
    word
    for server in ("kafka", "postgres", "redis")
    for part, value in (("registry", ""), ("repository", SERVERS.partition(":")[0]), ("tag", SERVERS.partition(":")[2]))
    for word in ("--set-string", f"trial.{server}.image.{part}={value}")
]
SILENCE = 10.0
"""Seconds after which a client of the Service would have complained."""
WARNINGS = 20
"""The number of warning events that a failed test prints."""


@dataclass
class Scenario:
    """One release in one namespace. The methods are called in the order of `main`."""

    kube: Kube
    feed: FactsFeed
    held: FactsFeed
    """A stream with a gap that stays open while the faults happen."""
    watch: PositionsWatch
    values: list[str]
    """Options of helm, the same for every install and upgrade."""
    standstill: float
    """Seconds that a position may stand still while facts come."""

    def install(self, chart: Path) -> None:
        """Install `chart`, which may be another one than the later upgrades use."""
        began = time.monotonic()
        replace(self.kube, chart=chart).helm("install", *self.values)
        self.kube.client(IMAGE)
        self.watch.start()
        until("the topics are there", self.feed.first_was_sent)
        self.settled("first position")
        say("helm install -> first position", time.monotonic() - began)
        self.kube.rolled_out()
        pod = self.kube.living_pod(f"{self.kube.name}-pipeline-0")
        assert not pod.restarts("sidecar"), "the sidecar did not wait for the schema"

    def only_the_driver_has_rights(self) -> None:
        """The token is in the container of Spark's driver alone, and stands for pods and nothing else."""
        assert self.kube.has_token("pipeline")
        assert not self.kube.has_token("sidecar")
        kinds = ("pods", "configmaps", "secrets", "services", "persistentvolumeclaims")
        asked = [(verb, kind) for verb in ("create", "list", "delete") for kind in kinds]
        allowed = {f"{verb} {kind}" for verb, kind in asked if self.kube.may(self.kube.name, verb, kind)}
        assert allowed == {"create pods", "list pods", "delete pods"}, allowed

    def helm_test(self) -> None:
        click.echo(self.kube.helm_test())

    def through(self, what: str, act: Callable[[], object]) -> None:
        """`act` some seconds into 20 000 facts, and over an open gap; afterwards every one of them is counted."""
        self.held.send_with_hole(1000)
        until("the held stream stands below its gap", lambda: self._stands(self.held))
        gap = self._gap()
        beyond = self.feed.last + 2000
        with self.feed.flowing(20_000, rate=1000):
            until("facts arrive", lambda: self.watch.position(self.feed.stream) > beyond)
            began = self.kube.clock()
            act()
        self.kube.rolled_out()
        self.settled(what)
        ended = self.kube.clock()
        assert self._stands(self.held), f"{what}: the line is at {self.watch.position(self.held.stream)}, over a gap"
        assert self._gap() == gap, f"{what}: the gap was {gap}, and is {self._gap()}"
        self.held.fill()
        self.settled(f"{what}, gap filled")
        self._require_truth()
        standstill = self.watch.longest_silence("redis", self.feed.stream, began, ended)
        silence = self.watch.longest_silence("sidecar", self.feed.stream, began, ended)
        say(f"{what}: longest standstill", standstill)
        say(f"{what}: longest without an answer of a sidecar", silence)
        assert standstill < self.standstill, f"{what}: more than {self.standstill:.0f} s"
        assert silence < SILENCE, f"{what}: more than {SILENCE:.0f} s without an answer"

    def settled(self, what: str) -> None:
        """Redis, sidecars and Postgres all say what was sent."""
        for feed in (self.feed, self.held):
            if not feed.last:
                continue
            until(f"{what}: {feed.stream} is at {feed.settled}", partial(self._stands, feed))
            until(f"{what}: so say the sidecars", partial(self._answered, feed))
            stored = self.kube.status(feed.stream)
            assert stored == feed.settled, f"Postgres says {stored}"
        click.echo(f"  {what}: {self.feed.settled:,} and {self.held.settled:,} everywhere")

    def every_move_is_chained_and_counted(self) -> None:
        """From the beginning: each begins where the one before ended, and facts and voids are as many as were sent."""
        for feed in (self.feed, self.held):
            moves = list(self._advances(feed.stream))
            assert [move["prev"] for move in moves] == [0, *(move["id"] for move in moves[:-1])]
            assert moves[-1]["id"] == feed.settled
            counted = {kind: sum(move[kind] for move in moves) for kind in ("facts", "empty", "unseen", "skipped")}
            facts, void = feed.counts()
            assert counted == {"facts": facts, "empty": void, "unseen": 0, "skipped": 0}, counted
            click.echo(f"  {feed.stream}: {len(moves)} moves, joined exactly: {facts:,} facts, {void:,} void")

    def soak(self, minutes: float) -> None:
        """1 000 facts a second; then what each container takes."""
        self.feed.send(int(minutes * 60_000), rate=1000)
        self.settled(f"{minutes:.0f} minutes at 1,000 records/s")
        for container, text in self.kube.memory().items():
            click.echo(f"  memory of {container}: {text}")

    def _stands(self, feed: FactsFeed) -> bool:
        return self.watch.position(feed.stream) == feed.settled

    def _answered(self, feed: FactsFeed) -> bool:
        answer = self.kube.over_http(f"/v1/streams/{feed.stream}")
        return (answer["linear"], answer["vector"]) == (feed.settled, {"writer": feed.settled})

    def _gap(self) -> dict[str, Any]:
        """The one gap of the held stream, as soon as the sidecar that is asked knows it."""
        found: list[dict[str, Any]] = []

        def told() -> bool:
            found[:] = self.kube.over_http(f"/v1/streams/{self.held.stream}/gaps")["gaps"]
            return [(gap["low"], gap["top"]) for gap in found] == [(self.held.hole - 1, self.held.hole)]

        until("the gap is told", told)
        return found[0]

    def _advances(self, stream: str) -> list[dict[str, Any]]:
        page = self.kube.over_http(f"/v1/streams/{stream}/advances")
        moves = page["moves"]
        while not page["complete"]:
            page = self.kube.over_http(f"/v1/streams/{stream}/advances?since={page['next']}")
            moves += page["moves"]
        return [move for move in moves if move["kind"] == "advance"]

    def _require_truth(self) -> None:
        """Of all that was told until now: nothing beyond what had been sent, and in Redis nothing back."""
        for feed in (self.feed, self.held):
            for source in ("redis", "sidecar"):
                for told in self.watch.told(source, feed.stream):
                    may_be = feed.may_be(told.at)
                    assert told.farthest <= may_be, f"{source} said {told} of {feed.stream}, sent was {may_be}"
            line = [told.linear for told in self.watch.told("redis", feed.stream)]
            back = [pair for pair in itertools.pairwise(line) if pair[0] >= pair[1]]
            assert not back, f"positions of {feed.stream} went back: {back}"


@click.command()
@click.option("--run", "prefix", default="", help="Goes before every helm and kubectl, where the cluster is elsewhere.")
@click.option("--build", default="helm/tools/build-image", help="Command that is given a directory and a name.")
@click.option("--load", default="kind load docker-image", help="Command that is given a name; empty: nothing to do.")
@click.option(
    "--namespace", default="tidemark-test", show_default=True, help="Made for the test, and deleted after it."
)
@click.option("--soak", type=float, default=0.0, help="Minutes of steady flow, for the memory of each container.")
@click.option("--standstill", type=float, default=90.0, show_default=True, help="Seconds that are still good.")
@click.option("--set", "chosen", multiple=True, help="A value more, name=value: spark.master=kubernetes for instance.")
@click.option("--images/--no-images", default=True, help="Build and load images first.")
@click.option(
    "--before", type=click.Path(path_type=Path), help="Chart to upgrade from; default: this one as 0.0.9+test."
)
@click.option("--helm", "helm_program", default="helm", show_default=True, help="helm is helm 3, helm4 is helm 4.")
def main(
    *,
    prefix: str,
    build: str,
    load: str,
    namespace: str,
    soak: float,
    standstill: float,
    chosen: tuple[str, ...],
    images: bool,
    before: Path | None,
    helm_program: str,
) -> None:
    """Install, break, upgrade, roll back, uninstall; compare positions with the truth all the time."""
    require_cluster(shlex.split(prefix), namespace)
    if images:
        built(shlex.split(build), shlex.split(load))
    kube = Kube(shlex.split(prefix), namespace, CHART, helm_program=helm_program)
    feed, held = FactsFeed(kube, "kube-test"), FactsFeed(kube, "kube-test-held")
    watch = PositionsWatch(kube, [feed.stream, held.stream])
    values = ["-f", str(CHART / "examples/trial.yaml"), "--set", "sidecar.replicas=2", *SERVER_IMAGES]
    values += [*image_options(IMAGE, "image"), *(word for one in chosen for word in ("--set", one))]
    scenario = Scenario(kube, feed, held, watch, values, standstill)
    faults = Faults(kube)
    kube.namespace_made()
    with printing_warnings(kube):
        run_faults(scenario, faults, before, soak, executors="spark.master=kubernetes" in chosen)
        watch.stop()
        timed("uninstall", kube.uninstalled)
        click.echo("every position was right")
        ours = image_options(IMAGE, "image")
        Tutorial(kube, [*ours, *SERVER_IMAGES]).followed()
        until("the uninstall leaves nothing", lambda: not kube.left())
        installs.tried(kube, [*ours, *image_options(SERVICES_IMAGE, "servicesImage")], SERVER_IMAGES)
    kube.namespace_deleted()


def run_faults(scenario: Scenario, faults: Faults, before: Path | None, soak: float, *, executors: bool) -> None:
    """Install the chart `before`, then run each fault. `executors`: Spark runs executor pods. `soak` is in minutes."""
    with tempfile.TemporaryDirectory() as scratch:
        scenario.install(before or chart_before(Path(scratch)))
    scenario.helm_test()
    if executors:
        scenario.only_the_driver_has_rights()
    if soak:
        scenario.soak(soak)
    scenario.through("pod killed", faults.pod_killed)
    scenario.through("process killed", faults.process_killed)
    scenario.through("sidecars killed", faults.sidecars_killed)
    if executors:
        scenario.through("executor killed", faults.executor_killed)
    scenario.through("node drained", faults.node_drained)
    upgrade = [*scenario.values, "--set", f"image.tag={NEXT_IMAGE.rpartition(':')[2]}"]
    scenario.through("upgrade of chart and image", partial(faults.upgraded, NEXT_IMAGE, upgrade))
    scenario.through("rollback", faults.rolled_back)
    scenario.through("broken release", partial(faults.broken_and_rolled_back, scenario.values))
    scenario.every_move_is_chained_and_counted()
    scenario.helm_test()


@contextmanager
def printing_warnings(kube: Kube) -> Iterator[None]:
    """If the test fails, print the last warning events of the namespace: helm and kubectl print only `timed out`."""
    try:
        yield
    except AssertionError:
        with suppress(AssertionError):  # a cluster that does not answer must not hide the error of the test
            for warning in kube.warnings()[-WARNINGS:]:
                click.echo(f"  {warning}", err=True)
        raise


def chart_before(directory: Path) -> Path:
    """This chart under an older version with build metadata, as delivery tools write it."""
    chart = directory / CHART.name
    shutil.copytree(CHART, chart)
    text = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(re.sub(r"(?m)^version: .*$", "version: 0.0.9+test", text))
    return chart


def require_cluster(prefix: list[str], namespace: str) -> None:
    """End with what the test needs, before it builds images."""
    try:
        done = subprocess.run(
            [*prefix, "kubectl", "get", "nodes", "--request-timeout=10s"], capture_output=True, text=True, check=False
        )
        problem = done.stderr.strip().rpartition("\n")[2] if done.returncode else None
    except FileNotFoundError as error:
        problem = f"{error.filename} is not on the PATH"
    if problem is not None:
        raise click.ClickException(
            f"kubectl reaches no cluster: {problem}\nkube-test needs a throw-away cluster, as of `kind create cluster`,"
            " and a context of kubectl with the rights of an administrator"
        )
    exists = [*prefix, "kubectl", "get", "namespace", namespace, "--ignore-not-found", "-o", "name"]
    if run(*exists).strip():
        raise click.ClickException(
            f"the namespace {namespace} exists, perhaps from a test that failed: delete it, or choose another one with"
            " --namespace"
        )


def built(build: list[str], load: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        # Another image: what it is made of is the same, and its name and digest are not.
        Path(scratch, "Dockerfile").write_text(f"FROM {IMAGE}\nLABEL tidemark.next=yes\n")
        commands = {
            IMAGE: [*build, str(ROOT)],
            SERVICES_IMAGE: ["env", "TARGET=services", *build, str(ROOT)],
            SERVERS: [*build, str(ROOT / "tests/helm/servers")],
            NEXT_IMAGE: [*build, scratch],
        }
        for name, command in commands.items():
            timed(f"build {name}", partial(run, *command, name))
            if load:
                timed(f"load {name}", partial(run, *load, name))


def image_options(image: str, value: str) -> list[str]:
    repository, _, tag = image.rpartition(":")
    return ["--set", f"{value}.repository={repository}", "--set", f"{value}.tag={tag}"]


if __name__ == "__main__":
    main()
