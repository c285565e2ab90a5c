"""`tidemark bundle`: write one archive for a fault report, even if some servers do not answer."""

import io
import platform
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO
from urllib.request import urlopen

import click

from tidemark.app.commands import CommandFailed, Utf8Command, load_settings
from tidemark.app.diagnosis import health, open_ranges
from tidemark.app.output import count, json_text, one_line
from tidemark.app.settings import Settings, settings_lines
from tidemark.app.verbs import gaps, status
from tidemark.common.errors import TidemarkError, Unavailable
from tidemark.sinks.postgres import status as postgres_status
from tidemark.sinks.postgres.database import session_of
from tidemark.sinks.postgres.store import Postgres, PostgresConfig
from tidemark.sinks.redis.publish import Redis, RedisConfig
from tidemark.sources.topics import Topics

TIMEOUT_SECONDS = 3.0  # for each answer of Redis, of Kafka and of a metrics URL
_PACKAGES = (
    "tidemark-streams",
    "pyspark",
    "confluent-kafka",
    "redis",
    "psycopg",
    "prometheus-client",
    "pandas",
    "pyarrow",
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A file of the archive.

    Attributes:
        name: the path of the file in the archive.
        server: the server or URL that `make` needs; empty if `make` needs none. After an `Unavailable`, the other parts
            of the same server are left out.
        make: returns the text of the file.
    """

    name: str
    server: str
    make: Callable[[], str]


@dataclass(slots=True)
class Bundle:
    """The result of writing a bundle.

    Attributes:
        file: the path of the archive.
        parts: the names of the files in the archive.
        problems: the name of each missing file -> the reason.
    """

    file: Path
    parts: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def write(settings: Settings, file: Path, metrics: Sequence[str]) -> Bundle:
    """Write a bundle to a new file. A part that cannot be read is left out, and the bundle has the reason.

    Args:
        settings: the settings, with the addresses of the servers.
        file: the path of the archive, which must not exist yet. Deleted if writing fails.
        metrics: the URLs whose answers become parts of the bundle.

    Raises:
        OSError: the file cannot be written, or exists (`FileExistsError`).
    """
    bundle = Bundle(file)
    with file.open("xb") as target, ExitStack() as stack:
        try:
            _write_archive(bundle, target, _parts(settings, metrics, stack))
            target.flush()
        except BaseException:
            file.unlink(missing_ok=True)
            raise
    return bundle


def to_text(bundle: Bundle) -> str:
    missing: dict[str, list[str]] = {}
    for part, problem in bundle.problems.items():
        missing.setdefault(problem, []).append(part)
    lines = [f"missing {_part_names(parts)}: {problem}" for problem, parts in missing.items()]
    return "\n".join(
        [
            *lines,
            f"wrote {bundle.file}: {count(len(bundle.parts), 'file')}, {bundle.file.stat().st_size / 1024:.0f} KiB",
            "The archive has names of streams, writers, hosts and operators, and reasons of overrides, but no facts"
            " and no passwords.",
        ]
    )


def _part_names(parts: Sequence[str]) -> str:
    return ", ".join(parts) if len(parts) < 3 else f"{parts[0]} and {len(parts) - 1} others"


def to_json(bundle: Bundle) -> str:
    return json_text({"file": str(bundle.file), "parts": bundle.parts, "problems": bundle.problems})


def _parts(settings: Settings, metrics: Sequence[str], stack: ExitStack) -> Iterator[_Part]:
    yield _Part("versions.json", "", _versions)
    yield _Part("settings.txt", "", lambda: "\n".join(settings_lines(settings)))
    postgres = stack.enter_context(Postgres(PostgresConfig(settings.postgres)))
    tables = stack.enter_context(session_of(settings.postgres, "tidemark bundle"))
    yield _Part("status.json", "Postgres", lambda: _status_json(settings, postgres))
    yield _Part("gaps.json", "Postgres", lambda: _gaps_json(settings, postgres))
    yield from (
        _Part(f"postgres/{table}.json", "Postgres", partial(postgres_status.dump, tables, table))
        for table in postgres_status.TABLES
    )
    yield _Part("redis.json", "Redis", lambda: _redis_json(settings))
    yield _Part("kafka.json", "Kafka", lambda: _kafka_json(settings))
    yield from (_Part(f"metrics-{number}.txt", url, partial(_read_url, url)) for number, url in enumerate(metrics, 1))


def _write_archive(bundle: Bundle, target: BinaryIO, parts: Iterator[_Part]) -> None:
    folder = bundle.file.name.removesuffix(".gz").removesuffix(".tar")
    unavailable: dict[str, str] = {}
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for part in parts:
            if part.server in unavailable:  # wait only once for a server that does not answer
                bundle.problems[part.name] = unavailable[part.server]
                continue
            try:
                text = part.make()
            except Exception as problem:  # noqa: BLE001 - a bug in one part must not prevent the others
                bundle.problems[part.name] = f"{type(problem).__name__}: {problem}"
                if isinstance(problem, TidemarkError):
                    bundle.problems[part.name] = one_line(problem)
                if isinstance(problem, Unavailable):
                    unavailable[part.server] = bundle.problems[part.name]
                continue
            _add_file(archive, f"{folder}/{part.name}", text)
            bundle.parts.append(part.name)
        _add_file(archive, f"{folder}/missing.json", json_text(bundle.problems))
        bundle.parts.append("missing.json")


def _add_file(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), int(time.time())
    archive.addfile(member, io.BytesIO(content))


def _versions() -> str:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    about = {"time": datetime.now(UTC).isoformat(), "python": platform.python_version(), "system": platform.platform()}
    return json_text({**about, **versions})


def _status_json(settings: Settings, postgres: Postgres) -> str:
    condition = health.read_configured_condition(settings, postgres)
    return status.to_json(status.read_stream_statuses(postgres, postgres.states()), time.time(), condition)


def _gaps_json(settings: Settings, postgres: Postgres) -> str:
    return gaps.to_json(
        open_ranges.read_open_ranges(postgres, postgres.states(), time.time(), settings.policy_defaults)
    )


def _redis_json(settings: Settings) -> str:
    """The positions in Redis as JSON, of the first `MAX_ROWS` streams in the order of their names."""
    with Redis(RedisConfig(settings.redis, timeout=TIMEOUT_SECONDS)) as redis:
        return json_text(redis.snapshots(sorted(redis.names())[: postgres_status.MAX_ROWS]))


def _kafka_json(settings: Settings) -> str:
    names = [settings.kafka_facts_topic, settings.kafka_control_topic, settings.kafka_dead_letters_topic]
    names += [settings.kafka_positions_topic] if settings.kafka_positions_topic else []
    return json_text(Topics(settings.kafka, TIMEOUT_SECONDS).describe(names))


def _read_url(url: str) -> str:
    with urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
        return str(answer.read().decode(errors="replace"))


@click.command("bundle", cls=Utf8Command)
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--metrics", multiple=True, help="Include the answer of this URL; may be repeated. Default: pipeline metrics."
)
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def bundle(file: Path | None, metrics: tuple[str, ...], *, as_json: bool) -> None:
    """Write a bundle for a fault report to FILE (.tar.gz): settings without secrets, versions, positions, gaps, rows of
    Tidemark's tables, topics and metrics. A file missing.json in the archive names the parts that could not be read.

    Default of FILE: a new file tidemark-bundle-TIME.tar.gz in the current directory.
    """
    settings = load_settings()
    chosen = file or Path(time.strftime("tidemark-bundle-%Y%m%d-%H%M%S.tar.gz", time.gmtime()))
    try:
        made = write(settings, chosen, metrics or (settings.metrics_url,))
    except OSError as problem:
        raise CommandFailed(f"cannot write {chosen}: {problem.strerror}") from None
    click.echo(to_json(made) if as_json else to_text(made))
