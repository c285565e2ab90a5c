"""A real Synapse for tests: main process and workers, each a process of its own, on a given database and Redis.

Its programs stand in a virtual environment of their own below TIDEMARK_HOME, which pip makes once.
"""

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psutil
from psycopg.conninfo import conninfo_to_dict

from tidemark.app.settings import load
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import LOOPBACK, ServerProcess, free_port, listens

PACKAGES = ("matrix-synapse[redis]==1.163.2", "psycopg2-binary", "hiredis")
_MODULES = Path(__file__).parent / "homeserver"
NAME = "syn.test"
_IN_HAND = "synapse_http_server_in_flight_requests_count"
MAIN = "main"
_FREE = {"per_second": 100_000, "burst_count": 100_000}
_LIMITS = {
    **dict.fromkeys(
        ("rc_message", "rc_registration", "rc_admin_redaction", "rc_joins_per_room", "rc_room_creation"), _FREE
    ),
    "rc_login": {"address": _FREE, "account": _FREE, "failed_attempts": _FREE},
    "rc_joins": {"local": _FREE, "remote": _FREE},
    "rc_invites": {"per_room": _FREE, "per_user": _FREE, "per_issuer": _FREE},
    "rc_presence": {"per_user": _FREE},
}
"""Synapse's brakes for strangers, released."""


class NoSynapse(Exception):
    """Its packages cannot be had here; the text says why."""


def programs() -> Path:
    """The Python that can run Synapse. Raises `NoSynapse`."""
    place = load().home / "synapse"
    place.mkdir(parents=True, exist_ok=True)
    python = place / "venv/bin/python"
    with (place / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = place / "installed"
        if not done.exists() or done.read_text() != " ".join(PACKAGES):
            for command in (
                [sys.executable, "-m", "venv", str(place / "venv")],
                [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES],
            ):
                made = subprocess.run(command, capture_output=True, text=True, check=False)
                if made.returncode:
                    raise NoSynapse((made.stderr.splitlines() or ["pip failed"])[-1])
            done.write_text(" ".join(PACKAGES))
    return python


class SynapseProcess(ServerProcess):
    """One process of a homeserver; `port` serves clients and other processes."""

    name: ClassVar[str] = "synapse"

    def __init__(self, home: Home, name: str, command: Sequence[str]) -> None:
        super().__init__(home, free_port())
        self.name = name  # type: ignore[misc]
        self._command = command

    def command(self) -> Sequence[str]:
        return self._command

    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(_MODULES)}

    def failure_cause(self) -> str:
        """With the traceback, which is far above the last line."""
        return self.log_tail(80)

    def answers(self) -> bool:
        """It itself: where another test run has taken the port meanwhile, a Synapse may answer there that is not this
        one, and workers of this one would begin before there is a database."""
        if self._process is None or not listens(self.port):
            return False
        try:
            if self.port not in {it.laddr.port for it in self._process.net_connections("tcp") if it.status == "LISTEN"}:
                return False
        except psutil.NoSuchProcess:
            return False
        try:
            return httpx.get(f"http://{LOOPBACK}:{self.port}/health", timeout=1).status_code == 200
        except httpx.HTTPError:
            return False


class Homeserver:
    """`writers`: which workers write which stream; what is not named there the main process writes."""

    def __init__(
        self, home: Home, python: Path, database: str, redis_port: int, writers: Mapping[str, Sequence[str]]
    ) -> None:
        self._python = str(python)
        self._root = home.data("synapse")
        self.dsn = database
        self._redis_port = redis_port
        self._writers = writers
        self._secret = secrets.token_hex(16)
        shared = self._root / "homeserver.yaml"
        self.main = SynapseProcess(home, MAIN, [self._python, "-m", "synapse.app.homeserver", "-c", str(shared)])
        self.replication_port = free_port()
        self.workers = {name: self._worker(home, name) for name in self._named()}
        self._tokens: dict[str, tuple[str, str]] = {}
        self.patience = 60.0
        """Seconds that an answer may take."""

    def start(self) -> None:
        self._configure()
        shared = ["-c", str(self._root / "homeserver.yaml")]
        self.main.run_preparation([self._python, "-m", "synapse.app.homeserver", *shared, "--generate-keys"])
        self._start_all()

    def _start_all(self) -> None:
        self.main.start()
        with ThreadPoolExecutor() as pool:
            [*pool.map(SynapseProcess.start, self.workers.values())]

    def rewrite(self, writers: Mapping[str, Sequence[str]]) -> None:
        """Begin again with these writers: every process reads in its configuration who they are. Each deletes the
        positions of those that are none any more, and of two that do it at once Synapse ends one: the main process is
        first."""
        self.stop()
        self._writers = writers
        home = self.main.home
        self.workers = {name: self.workers.get(name) or self._worker(home, name) for name in self._named()}
        self._configure()
        self._start_all()

    def _named(self) -> list[str]:
        return [*dict.fromkeys(name for workers in self._writers.values() for name in workers)]

    def stop(self) -> None:
        for process in [*self.workers.values(), self.main]:
            process.kill()  # its orderly end takes seconds, and everything of it is thrown away

    def call(self, at: str, method: str, path: str, user: str | None = None, body: object = None) -> Any:
        """What the process `at` answers a client of this user. Raises `httpx.HTTPError`."""
        process = self.main if at == MAIN else self.workers[at]
        head = {"Authorization": f"Bearer {self._token(user)}"} if user else {}
        # One that is sent for another, which is dead, is tried for long.
        found = httpx.request(
            method, f"http://{LOOPBACK}:{process.port}{path}", json=body, headers=head, timeout=self.patience
        ).raise_for_status()
        return found.json()

    def client(self, method: str, path: str, user: str, body: object = None, at: str = MAIN) -> Any:
        return self.call(at, method, f"/_matrix/client/v3{path}", user, body)

    def room(self, user: str, at: str = MAIN) -> str:
        """A new room; its events are written by one of the writers, as the hash of its name says."""
        return str(self.client("POST", "/createRoom", user, {"preset": "public_chat"}, at)["room_id"])

    def send(self, room: str, user: str, text: str, at: str = MAIN) -> str:
        """The ID of the event, once it is committed."""
        body = {"msgtype": "m.text", "body": text}
        path = f"/rooms/{room}/send/m.room.message/{secrets.token_hex(8)}"
        return str(self.client("PUT", path, user, body, at)["event_id"])

    def synced(self, user: str, since: str = "", at: str = MAIN) -> Any:
        """What a client is told that syncs now, and is offline to others."""
        other = {"room": {"timeline": {"not_types": [secrets.token_hex(4)]}}}  # no answer is reused
        words = f"timeout=0&set_presence=offline&filter={json.dumps(other)}" + (f"&since={since}" if since else "")
        return self.client("GET", f"/sync?{words}", user, at=at)

    def token(self, user: str) -> str:
        """How far `events` is, as a client that syncs now is told: `s5`, or `m5~1.7`."""
        return str(self.synced(user)["next_batch"]).partition("_")[0]

    def in_hand(self) -> list[str]:
        """What the main process works on that may write, also where nobody waits for the answer any more: what it has
        for a worker that is dead it tries again after 1, 2, 4, 8, 16 and 32 seconds."""
        found = httpx.get(f"http://{LOOPBACK}:{self.main.port}/_synapse/metrics", timeout=self.patience)
        counts = [line for line in found.raise_for_status().text.splitlines() if line.startswith(f"{_IN_HAND}{{")]
        assert any('servlet="MetricsResource"' in line for line in counts), counts  # this question itself
        return [line for line in counts if 'method="GET"' not in line and not line.endswith(" 0.0")]

    def device(self, user: str) -> str:
        return self._session(user)[1]

    def _token(self, user: str) -> str:
        return self._session(user)[0]

    def _session(self, user: str) -> tuple[str, str]:
        if user not in self._tokens:
            path = "/_synapse/admin/v1/register"
            nonce = self.call(MAIN, "GET", path)["nonce"]
            said = f"{nonce}\0{user}\0secret\0notadmin".encode()
            body = {"nonce": nonce, "username": user, "password": "secret", "admin": False}
            body["mac"] = hmac.new(self._secret.encode(), said, hashlib.sha1).hexdigest()
            made = self.call(MAIN, "POST", path, body=body)
            self._tokens[user] = made["access_token"], made["device_id"]
        return self._tokens[user]

    def _worker(self, home: Home, name: str) -> SynapseProcess:
        files = [str(self._root / "homeserver.yaml"), "-c", str(self._root / f"{name}.yaml")]
        return SynapseProcess(home, name, [self._python, "-m", "synapse.app.generic_worker", "-c", *files])

    @contextmanager
    def listener(self, name: str, redis_port: int, lines_port: int) -> Iterator[SynapseProcess]:
        """A worker that writes nothing, and hears of what others write by another Redis than theirs alone. Beside, it
        keeps what it hears by the line protocol."""
        self.workers[name] = self._worker(self.main.home, name)
        lines = {"module": "tidemark_modules.LineClient", "config": {"host": LOOPBACK, "port": lines_port}}
        self._describe(name, redis={"enabled": True, "host": LOOPBACK, "port": redis_port}, modules=[lines])
        try:
            self.workers[name].start()
            yield self.workers[name]
        finally:
            self.workers.pop(name).kill()

    def backfill(self, room: str, user: str, count: int, *, outlier: bool = False) -> list[str]:
        """The IDs of so many events from before the user was in the room, persisted as history of another server."""
        body = {"room": room, "sender": f"@{user}:{NAME}", "count": count, "outlier": outlier}
        return list(self.call(MAIN, "POST", "/_synapse/client/backfill", user, body)["events"])

    def _describe(self, name: str, **more: object) -> None:
        listeners = [_listener(self.workers[name].port, "client", "replication")]
        worker = {"worker_app": "synapse.app.generic_worker", "worker_name": name, "worker_listeners": listeners}
        self._write(name, {**worker, "worker_log_config": str(self._root / "log.yaml"), **more})

    def _configure(self) -> None:
        at = conninfo_to_dict(self.dsn)
        self._write("homeserver", self._shared(at))
        for name in self.workers:
            self._describe(name)
        handlers = {"file": {"class": "logging.StreamHandler", "formatter": "plain"}}
        formats = {"plain": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}}
        root = {"level": "WARNING", "handlers": ["file"]}
        log = {"version": 1, "disable_existing_loggers": False, "formatters": formats, "handlers": handlers}
        self._write("log", {**log, "root": root})

    def _shared(self, at: Mapping[str, Any]) -> dict[str, object]:
        login = {key: at[key] for key in ("user", "password", "host", "port", "dbname") if at.get(key)}
        workers = {name: {"host": LOOPBACK, "port": process.port} for name, process in self.workers.items()}
        return {
            "server_name": NAME,
            "public_baseurl": f"http://{LOOPBACK}:{self.main.port}/",
            "report_stats": False,
            "suppress_key_server_warning": True,
            "trusted_key_servers": [],
            "signing_key_path": str(self._root / "signing.key"),
            "media_store_path": str(self._root / "media"),
            "pid_file": str(self._root / "main.pid"),
            "log_config": str(self._root / "log.yaml"),
            **dict.fromkeys(("macaroon_secret_key", "form_secret", "worker_replication_secret"), self._secret),
            "registration_shared_secret": self._secret,
            "send_federation": False,
            "federation_domain_whitelist": [],
            "presence": {"enabled": True},
            "database": {"name": "psycopg2", "args": {**login, "cp_min": 1, "cp_max": 4}},
            "redis": {"enabled": True, "host": LOOPBACK, "port": self._redis_port},
            "enable_metrics": True,
            "modules": [{"module": f"tidemark_modules.{name}"} for name in ("Backfill", "Signatures")],
            "listeners": [
                _listener(self.main.port, "client", "metrics"),
                _listener(self.replication_port, "replication"),
            ],
            "instance_map": {"main": {"host": LOOPBACK, "port": self.replication_port}, **workers},
            "stream_writers": {stream: [*names] for stream, names in self._writers.items()},
            **_LIMITS,
        }

    def _write(self, name: str, content: object) -> None:
        (self._root / f"{name}.yaml").write_text(json.dumps(content))  # which YAML contains


def _listener(port: int, *resources: str) -> dict[str, object]:
    return {"port": port, "bind_addresses": [LOOPBACK], "type": "http", "resources": [{"names": [*resources]}]}
