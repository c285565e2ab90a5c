"""`make kube-test`: Tidemark on the current cluster, installed, broken, upgraded: what is published against the truth.

Run as `python -m tests.helm.cluster`. Builds the image and stand-ins for the trial's servers, loads them, installs the
trial, lets facts flow while pods die and releases change, and compares what is published with what was sent every time.
Prints its figures; ends with 1 at the first thing that is wrong, and leaves the release for you to look at.
"""

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import click

from tests.helm.feed import FactsFeed, RedisWatch
from tests.helm.kube import Kube
from tests.helm.tools import CHART, ROOT, run

IMAGE = "localhost/tidemark:dev"
SERVERS = "localhost/tidemark-servers:dev"
STREAM = "kube-test"
PATIENCE = 300.0


@dataclass
class Scenario:
    """One release in one namespace. The methods are called in the order of `main`."""

    kube: Kube
    feed: FactsFeed
    watch: RedisWatch
    values: list[str]
    """Options of helm, the same for every install and upgrade."""
    last: int = 0
    """The highest ID that was sent; all below it too, so it is where the stream must come to stand."""

    def install(self) -> None:
        began = time.monotonic()
        self.kube.helm("install", *self.values)
        self.kube.client(IMAGE)
        self.watch.start()
        self.last = 1
        until("the topics are there", lambda: self.feed.sent(1, 1))
        self.settled("first position")
        say("helm install -> first position", time.monotonic() - began)

    def helm_test(self) -> None:
        click.echo(self.kube.helm_test())

    def holds_at_a_hole(self) -> None:
        """All but one are complete: the stream stands right below it, and goes to the end as it comes."""
        first, self.last = self.last + 1, self.last + 1000
        hole = first + 500
        self.feed.send(first, self.last, rate=0, hole=hole)
        until(f"the stream stands below the hole at {hole}", lambda: self.watch.position == hole - 1)
        self.feed.send(hole, hole, rate=0)
        self.settled("the hole was filled")

    def while_facts_flow(self, what: str, act: Callable[[], object]) -> None:
        """`act` some seconds into 20 000 facts; afterwards every one of them is counted."""
        first, self.last = self.last + 1, self.last + 20_000
        with self.feed.flowing(first, self.last, rate=1000):
            until("facts arrive", lambda: self.watch.position > first + 2000)
            began = time.monotonic()
            act()
        self.kube.rolled_out()
        self.settled(what)
        say(f"{what}: longest standstill", self.watch.longest_standstill(began))

    def settled(self, what: str) -> None:
        """Redis, sidecar and Postgres all say what was sent, and nothing ever went back."""
        until(f"{what}: the stream is at {self.last}", lambda: self.watch.position == self.last)
        self.watch.require_ascending()
        linear, vector = self.kube.over_http(STREAM)
        assert (linear, vector) == (self.last, {"writer": self.last}), f"the sidecar says {linear} {vector}"
        stored = self.kube.status(STREAM)
        assert stored == self.last, f"Postgres says {stored}"
        click.echo(f"  {what}: {self.last:,} everywhere")

    def soak(self, minutes: float) -> None:
        """1 000 facts a second; then what each container takes."""
        first, self.last = self.last + 1, self.last + int(minutes * 60_000)
        self.feed.send(first, self.last, rate=1000)
        self.settled(f"{minutes:.0f} minutes at 1,000 records/s")
        for container, text in self.kube.memory().items():
            click.echo(f"  memory of {container}: {text}")


@click.command()
@click.option("--run", "prefix", default="", help="Goes before every helm and kubectl, where the cluster is elsewhere.")
@click.option("--build", default="helm/tools/build-image", help="Command that is given a directory and a name.")
@click.option("--load", default="kind load docker-image", help="Command that is given a name; empty: nothing to do.")
@click.option(
    "--namespace", default="tidemark-test", show_default=True, help="Made for the test, and deleted after it."
)
@click.option("--soak", type=float, default=0.0, help="Minutes of steady flow, for the memory of each container.")
@click.option("--set", "chosen", multiple=True, help="A value more, name=value: spark.master=kubernetes for instance.")
@click.option("--images/--no-images", default=True, help="Build and load images first.")
def main(
    *, prefix: str, build: str, load: str, namespace: str, soak: float, chosen: tuple[str, ...], images: bool
) -> None:
    """Install, break, upgrade, roll back, uninstall; compare positions with the truth each time."""
    if images:
        for context, name in ((ROOT, IMAGE), (ROOT / "tests/helm/servers", SERVERS)):
            timed(f"build {name}", partial(run, *shlex.split(build), context, name))
            if load:
                timed(f"load {name}", partial(run, *shlex.split(load), name))
    kube = Kube(shlex.split(prefix), namespace, CHART)
    scenario = Scenario(kube, FactsFeed(kube, STREAM), RedisWatch(kube, STREAM), _values(chosen))
    kube.namespace_made()
    scenario.install()
    scenario.helm_test()
    scenario.holds_at_a_hole()
    if soak:
        scenario.soak(soak)
    pod = f"{kube.name}-pipeline-0"
    scenario.while_facts_flow("pod killed", lambda: kube.delete_pod(pod, "--grace-period=0", "--force"))
    scenario.while_facts_flow("process killed", lambda: kube.kill_process(pod))
    scenario.while_facts_flow("pod drained", lambda: kube.delete_pod(pod))
    change = ["--set", "settings.HISTORY_DAYS=3", "--set", "sidecar.replicas=1"]
    scenario.while_facts_flow("upgrade", lambda: kube.helm("upgrade", *scenario.values, *change))
    scenario.while_facts_flow("rollback", kube.rollback)
    scenario.helm_test()
    scenario.watch.stop()
    timed("uninstall", kube.uninstall)
    left = kube.left()
    assert not left, f"the uninstall left {left}"
    kube.namespace_deleted()
    click.echo("every position was right")


def _values(chosen: tuple[str, ...]) -> list[str]:
    repository, _, tag = IMAGE.rpartition(":")
    servers = [f"trial.{server}.image={SERVERS}" for server in ("kafka", "postgres", "redis")]
    values = ["-f", str(CHART / "examples/trial.yaml")]
    for one in (f"image.repository={repository}", f"image.tag={tag}", *servers, *chosen):
        values += ["--set", one]
    return values


def say(what: str, seconds: float) -> None:
    click.echo(f"{what:<45}{seconds:8.1f} s")


def timed(what: str, act: Callable[[], object]) -> None:
    began = time.monotonic()
    act()
    say(what, time.monotonic() - began)


def until(what: str, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"not within {PATIENCE:.0f} s: {what}"
        time.sleep(0.1)


if __name__ == "__main__":
    main()
