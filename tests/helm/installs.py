"""`make kube-test`, its second half: Tidemark beside servers of one's own, with the mistakes that people make.

It is installed word for word as docs/how-to/kubernetes.md says; the checks read what users see. A second release,
the trial without its pipeline, plays the servers.
"""

import json
import re
import shlex
import subprocess
from dataclasses import dataclass, replace
from functools import partial

from tests.helm.faults import timed
from tests.helm.kube import Kube, PodState, until
from tests.helm.tools import CHART, ROOT, tool

PASSWORD = "correct-horse"
SOMEBODY = 1_000_650_000
"""Users come from ranges like this one where the platform chooses them."""


def documented(page: str) -> list[str]:
    """The first block of commands on docs/how-to/kubernetes.md, without the image build: one command an entry."""
    [block, *_] = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    commands = block.replace("\\\n", " ").splitlines()
    return [command for command in commands if not command.startswith("make image")]


@dataclass(frozen=True, slots=True)
class OwnServers:
    """Kafka, Redis and Postgres at the names that the documentation uses."""

    kube: Kube

    def start(self, images: list[str]) -> None:
        options = ["-f", str(CHART / "examples/trial.yaml"), "--set", "pipeline.enabled=false", *images]
        self.kube.helm("install", *options, "--wait", "--timeout", "3m")
        for server in ("kafka", "redis", "postgres"):
            where = f"{self.kube.name}-tidemark-{server}.{self.kube.namespace}.svc.cluster.local"
            spec = {"type": "ExternalName", "externalName": where}
            service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": server}, "spec": spec}
            self.kube.kubectl("apply", "-f", "-", given=json.dumps(service))
        self.sql("tidemark", f"create role tidemark login password '{PASSWORD}'")
        self.sql("tidemark", "alter database tidemark owner to tidemark")
        self.sql("tidemark", f"create role shop login superuser password '{PASSWORD}'")
        self.sql("tidemark", "create database shop owner shop")

    def sql(self, database: str, statement: str) -> str:
        script = 'export PGPASSWORD=$(cat /etc/tidemark/trial/password); exec psql -h 127.0.0.1 -U postgres -Atq "$@"'
        pod = f"{self.kube.name}-tidemark-postgres-0"
        return self.kube.kubectl("exec", pod, "--", "sh", "-euc", script, "sh", "-d", database, "-c", statement)


@dataclass(frozen=True, slots=True)
class Installs:
    kube: Kube
    servers: OwnServers
    images: list[str]
    """Options that say where our images are; the documentation's registry is an example."""

    def wrong_password(self) -> None:
        """What Postgres said is what helm prints; the documented command has it too; an uninstall takes it all."""
        self._secret("wrong")
        said = self._documented_install_fails()
        assert "password authentication failed for user" in said, said
        assert "TIDEMARK_POSTGRES_PASSWORD" in said, said
        assert "password authentication failed" in self.kube.kubectl("logs", "job/tidemark-migrations")
        self.kube.uninstalled()

    def missing_secret(self) -> None:
        """helm prints the name of the Secret and of its key within its own time-out."""
        said = self._documented_install_fails()
        assert f"the Secret {self.kube.namespace}/tidemark-postgres does not exist or has no key password" in said, said
        self.kube.uninstalled()

    def unreachable_server(self) -> None:
        said = self._documented_install_fails(
            "--set", "postgres.dsn=host=nowhere dbname=tidemark user=tidemark", "--set", "migrations.timeoutSeconds=10"
        )
        assert "nowhere" in said, said
        self.kube.uninstalled()

    def as_documented(self) -> None:
        """As a user whom nobody knows, with the small image for what needs no Spark, and a relay beside."""
        self._secret(PASSWORD)
        self.kube.kubectl("create", "secret", "generic", "shop", f"--from-literal=password={PASSWORD}",
            f"--from-literal=dsn=host=postgres dbname=shop user=shop password={PASSWORD}")  # fmt: skip
        user = [f"podSecurityContext.{name}={SOMEBODY}" for name in ("runAsUser", "fsGroup")]
        shop = ["name=shop", "dsn=host=postgres dbname=shop user=shop", "passwordSecret.name=shop"]
        shop += ["migrate.dsnSecret.name=shop", "migrate.streams[0]=orders"]
        more = [*user, "podSecurityContext.runAsGroup=0", *(f"relay.databases[0].{one}" for one in shop)]
        for command in documented((ROOT / "docs/how-to/kubernetes.md").read_text()):
            if "create secret" in command:
                continue
            options = [*self.images, *(word for one in more for word in ("--set", one))] if "install" in command else []
            done = self._said(command, *options)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            self.kube.rolled_out()
        self.kube.kubectl("rollout", "status", "deployment/tidemark-relay-shop", "--timeout=2m")
        for pod in ("tidemark-pipeline-0", "deployment/tidemark-relay-shop"):
            who = self.kube.kubectl("exec", pod, "--", "python", "-c", "import os; print(os.getuid(), os.getgid())")
            assert who.split() == [str(SOMEBODY), "0"], f"{pod} runs as {who}"

    def relayed(self) -> None:
        """What the service appends in its transaction arrives."""
        self._append(1)
        until("the relay's fact is counted", lambda: self.kube.status("orders") == 1)

    def relay_killed(self) -> None:
        """While facts are appended: the next pod goes on after the last fact that Kafka has."""
        self._append(500)
        before = self.kube.pods("relay")
        self.kube.delete_pods(before)
        self._append(500)
        until("there is another relay", lambda: bool(set(self.kube.pods("relay")) - set(before)))
        until("every fact is counted", lambda: self.kube.status("orders") == 1001)

    def _append(self, count: int) -> None:
        """One transaction for each fact."""
        statement = (
            f"do $$ begin for i in 1..{count} loop perform tidemark.append('orders', '{{}}'); commit; end loop; end $$"
        )
        self.servers.sql("shop", statement)

    def executor_pending(self) -> None:
        """No node takes the executors: not ready, and `helm test` says what is missing; a rollback mends it."""
        nowhere = ["--set", "spark.master=kubernetes", "--set", "spark.executor.nodeSelector.nowhere=yes"]
        before = self._pod().uid
        self.kube.helm("upgrade", "--reuse-values", *nowhere)
        until("the pod is another one", lambda: self._pod().uid != before)
        until("an executor waits for a node", lambda: bool(self.kube.pods("executor")))
        said = self._said("helm test tidemark", "--timeout", "4m")
        assert said.returncode != 0
        assert "executor" in said.stdout + said.stderr, said
        assert not self._pod().ready
        timed("helm rollback -> ready", self._mended)

    def _pod(self) -> PodState:
        return self.kube.living_pod(f"{self.kube.name}-pipeline-0")

    def _mended(self) -> None:
        self.kube.rollback()
        self.kube.rolled_out()

    def _secret(self, password: str) -> None:
        self.kube.kubectl("delete", "secret", "tidemark-postgres", "--ignore-not-found")
        [command] = [
            one for one in documented((ROOT / "docs/how-to/kubernetes.md").read_text()) if "create secret" in one
        ]
        done = self._said(command.replace("...", password))
        assert done.returncode == 0, done

    def _documented_install_fails(self, *more: str) -> str:
        [command] = [
            one for one in documented((ROOT / "docs/how-to/kubernetes.md").read_text()) if "helm install" in one
        ]
        done = self._said(command, *self.images, *more)
        assert done.returncode != 0, f"it should have failed: {command} {more}"
        return done.stdout + done.stderr

    def _said(self, command: str, *more: str) -> "subprocess.CompletedProcess[str]":
        """What a command of the documentation says, from the directory in which people call it."""
        program, *words = shlex.split(command)
        path = tool(self.kube.helm_program) if program == "helm" else program
        line = [*self.kube.prefix, path, "-n", self.kube.namespace, *words, *more]
        return subprocess.run(list(map(str, line)), cwd=ROOT, capture_output=True, text=True, check=False)


def tried(kube: Kube, ours: list[str], servers: list[str]) -> None:
    """All of it, in `kube`'s namespace. `ours` and `servers` are helm's options that say where images are."""
    own = OwnServers(replace(kube, name="servers"))
    timed("own servers", partial(own.start, servers))
    installs = Installs(kube, own, ours)
    timed("missing Secret: helm says so", installs.missing_secret)
    timed("wrong password: helm says so", installs.wrong_password)
    timed("unreachable server: helm says so", installs.unreachable_server)
    timed("install as documented", installs.as_documented)
    timed("fact by the relay", installs.relayed)
    timed("relay killed: every fact counted", installs.relay_killed)
    timed("executors without a node: helm test says so", installs.executor_pending)
    timed("uninstall", kube.uninstalled)
    timed("uninstall of the servers", own.kube.uninstalled)
