"""Faults and changes of a release in `make kube-test`. Each method returns when the fault has visibly happened,
so that a kill without a victim fails the test."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import click

from tests.helm.kube import Kube, PodState, until

NO_IMAGE = {"ErrImagePull", "ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName"}


@dataclass(frozen=True, slots=True)
class Faults:
    kube: Kube

    def pod_killed(self) -> None:
        before = self._pod()
        self.kube.delete_pods([self._name])
        self._is_another(before)

    def process_killed(self) -> None:
        before = self._pod()
        self.kube.kill_process(self._name)
        until("the pipeline's container started again", lambda: self._restarts() > before.restarts("pipeline"))
        assert self._pod().uid == before.uid, "the pod was replaced, and only its process was to die"

    def sidecars_killed(self) -> None:
        """All pods of the Deployment at once. The sidecar in the pipeline's pod answers alone until they are back."""
        before = self.kube.pods("sidecar")
        self.kube.delete_pods(before)
        until("there are as many other sidecars", lambda: self._ready_besides("sidecar", before) == len(before))

    def executor_killed(self) -> None:
        """One of Spark's executors, without warning. Spark asks for another one."""
        before = self.kube.pods("executor")
        # The executors of a killed driver process stay as completed pods until the driver's pod is deleted.
        running = self.kube.pods("executor", "--field-selector=status.phase=Running")
        self.kube.delete_pods(running[:1])
        until("there is another executor", lambda: bool(set(self.kube.pods("executor")) - set(before)))

    def node_drained(self) -> None:
        """The node of the pipeline loses it and its sidecars. Another node takes them, or this one when it is back."""
        before = self._pod()
        assert before.node is not None
        sidecars = [name for name in self.kube.pods("sidecar") if self._node(name) == before.node]
        with self.kube.draining(before.node, "pipeline", "sidecar"):
            self._is_another(before)
            until("the pod waits for a node, or found another", lambda: self._pod().node != before.node)
            # The disruption budget: one at a time, and the next when that one has a place.
            gone = set(sidecars) - set(self.kube.pods("sidecar"))
            click.echo(f"  drained: {len(gone)} of {len(sidecars)} sidecars gone, the pipeline on {self._pod().node}")
            is_empty = len(gone) == len(sidecars) > 0
            assert self._pod().node is not None or not is_empty, "the drain took every sidecar"
        left = set(sidecars) & set(self.kube.pods("sidecar"))
        assert not left, f"the drain left {left}"

    def upgraded(self, image: str, options: list[str]) -> None:
        before = self._pod()
        self.kube.helm("upgrade", *options)
        self._is_another(before)
        assert self._pod().image("pipeline") == image

    def rolled_back(self) -> None:
        before = self._pod()
        self.kube.rollback()
        self._is_another(before)
        assert self._pod().image("pipeline") != before.image("pipeline")

    def broken_and_rolled_back(self, options: list[str]) -> None:
        """An image that is not there; then nothing but `helm rollback`."""
        image = self._pod().image("pipeline")
        self.kube.helm("upgrade", *options, "--set", "image.tag=broken")
        until("the image is missed", lambda: self._pod().waits_for(NO_IMAGE))
        self.kube.rollback()
        asked = time.monotonic()
        until("the pod is ready again", lambda: self._pod().ready and self._pod().image("pipeline") == image)
        say("helm rollback of a broken release -> ready", time.monotonic() - asked)

    @property
    def _name(self) -> str:
        return f"{self.kube.name}-pipeline-0"

    def _pod(self) -> PodState:
        return self.kube.living_pod(self._name)

    def _node(self, pod: str) -> str | None:
        state = self.kube.pod(pod)
        return state.node if state is not None else None

    def _ready_besides(self, component: str, others: list[str]) -> int:
        """How many pods of the component are ready and none of `others`."""
        pods = [self.kube.pod(name) for name in self.kube.pods(component) if name not in others]
        return sum(pod is not None and pod.ready for pod in pods)

    def _restarts(self) -> int:
        return self._pod().restarts("pipeline")

    def _is_another(self, before: PodState) -> None:
        until("the pod is another one", lambda: self._pod().uid != before.uid)


def say(what: str, seconds: float) -> None:
    click.echo(f"{what:<60}{seconds:8.1f} s")


def timed(what: str, act: Callable[[], object]) -> None:
    began = time.monotonic()
    act()
    say(what, time.monotonic() - began)
