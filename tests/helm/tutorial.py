"""`make kube-test`, last part: docs/tutorials/kubernetes.md word for word, with the time of each command."""

import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass
from functools import partial

from tests.helm.faults import timed
from tests.helm.kube import Kube, until
from tests.helm.tools import ROOT, run, tool

PAGE = ROOT / "docs/tutorials/kubernetes.md"
OTHERS = ("kind ", "make image", "kubectl get pods --watch")
"""Commands that `make kube-test` has run already in its own way, and one that does not end."""


def commands(page: str) -> list[str]:
    """The commands of the page that the test runs, one an entry, in their order."""
    lines = [line for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    read: list[str] = []
    for line in lines:
        if line.startswith("$ "):
            read.append(line.removeprefix("$ "))
        elif line.startswith(" "):  # a command goes on
            read[-1] += f"\n{line}"
    return [command for command in read if not command.startswith(OTHERS)]


@dataclass(frozen=True, slots=True)
class Tutorial:
    kube: Kube
    images: list[str]
    """Options of helm that say where the images are."""

    def followed(self) -> None:
        for command in commands(PAGE.read_text()):
            if "port-forward" in command:
                forward = subprocess.Popen(self._line(command), stdout=subprocess.DEVNULL, start_new_session=True)
            elif command.startswith("curl"):
                try:
                    timed(command, partial(until, "the answer has the fact", partial(self._has_fact, command)))
                finally:
                    os.killpg(forward.pid, signal.SIGTERM)  # the shell and its child
                    forward.wait(30)
            elif command.startswith("helm install"):
                timed(command, partial(run, *self._line(f"{command} {shlex.join(self.images)}")))
            else:
                timed(command, partial(run, *self._line(command)))
                if "delete pod" in command:
                    timed("  until the pod is ready", self.kube.rolled_out)

    def _has_fact(self, command: str) -> bool:
        """The position may need a second after the record."""
        done = subprocess.run(self._line(command), capture_output=True, text=True, check=False)
        return '"linear":1' in done.stdout.replace(" ", "")

    def _line(self, command: str) -> list[str]:
        """The command in a shell whose helm and kubectl use the test's namespace."""
        programs = {"helm": tool(self.kube.helm_program), "kubectl": "kubectl"}
        functions = [
            f'{name}() {{ command {shlex.quote(str(path))} -n {self.kube.namespace} "$@"; }}'
            for name, path in programs.items()
        ]
        return [*self.kube.prefix, "bash", "-c", "\n".join([*functions, command])]
