"""`tidemark doctor` names what is wrong with the machine, the settings and the servers, and how to repair it."""

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import redis
from click.testing import CliRunner, Result
from confluent_kafka.admin import AdminClient, NewTopic
from psycopg.conninfo import make_conninfo

from tests.waiting import eventually
from tidemark.app.cli import main
from tidemark.app.settings import load
from tidemark.app.stack import home
from tidemark.app.stack.processes import free_port
from tidemark.app.verbs import doctor
from tidemark.app.verbs.doctor import Check, check_clock
from tidemark.common.environment import child_environment
from tidemark.sources.kafka import KafkaConnection
from tidemark.sources.topics import Topics, topic_plans

NOWHERE = "127.0.0.1:1"
AWAY = {
    "TIDEMARK_POSTGRES_DSN": f"postgresql://{NOWHERE}/tidemark",
    "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": NOWHERE,
    "TIDEMARK_REDIS_URL": f"redis://{NOWHERE}/0",
}


@pytest.fixture
def variables(
    migrated: str, redis_url: str, connection: KafkaConnection, prefix: str, tmp_path: Path
) -> dict[str, str]:
    """Settings of servers that have all that Tidemark needs."""
    names = [f"{prefix}.{name}" for name in ("facts", "control", "dead-letters")]
    Topics(connection).create_missing(topic_plans(names[0], names[1], names[2], 2))
    ports = {f"TIDEMARK_{name}_PORT": "0" for name in ("METRICS", "SIDECAR")}
    return {
        "TIDEMARK_POSTGRES_DSN": migrated,
        "TIDEMARK_REDIS_URL": redis_url,
        "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": connection.bootstrap,
        "TIDEMARK_KAFKA_FACTS_TOPIC": names[0],
        "TIDEMARK_KAFKA_CONTROL_TOPIC": names[1],
        "TIDEMARK_KAFKA_DEAD_LETTERS_TOPIC": names[2],
        "TIDEMARK_HOME": str(tmp_path),
        **ports,
    }


def run(variables: Mapping[str, str], *words: str) -> Result:
    return CliRunner(env=dict(variables)).invoke(main, ["doctor", *words])


def checks(variables: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The checks by name."""
    return {check["name"]: check for check in json.loads(run(variables, "--json").stdout)["checks"]}


def test_sound_servers_pass(variables: dict[str, str]) -> None:
    """Every check of a server passes, but for what a test's own broker cannot have: a second replica."""
    done = run(variables, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["ok"] is True
    states = {check["name"]: check["status"] for check in found["checks"]}
    for name in ("Python", "Tidemark", "Settings", "Java", "Postgres", "Postgres clock", "Postgres schema", "Redis"):
        assert states[name] == "ok", name
    assert states["Postgres rights"] == states["Redis rights"] == states["Redis clock"] == "ok"
    topics = [check for check in found["checks"] if check["name"].startswith("Topic ")]
    assert [check["status"] for check in topics] == ["warning"] * 3
    assert "1 replica" in topics[0]["detail"]


def test_each_check_is_one_line(variables: dict[str, str]) -> None:
    """Status, name, result and remedy; the last line counts."""
    done = run(variables)
    assert done.exit_code == 0
    *lines, last = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warning", "failed", "skipped"}
    assert last.endswith("0 failed")


def test_java_of_an_unknown_version_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program prints its version at its first start only, so the second start shows none."""
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    lines = "#!/bin/sh", """[ -e started ] || echo 'openjdk version "17.0.1"' >&2""", "touch started"
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    check = doctor._check_java(load())
    assert (check.status, check.detail) == (
        "warning",
        f"the version of {program} is unknown; Tidemark is tested with Java 17 and 21",
    )
    assert f"{program} -version" in check.remedy


@pytest.mark.jvm
def test_servers_that_are_away_are_named_with_their_settings() -> None:
    """Each of them; the exit code is for scripts."""
    done = run(AWAY)
    assert done.exit_code == 1
    for name, variable in zip(("Postgres", "Kafka", "Redis"), AWAY, strict=True):
        [line] = [line for line in done.stdout.splitlines() if line.startswith("failed") and f" {name} " in line]
        assert NOWHERE in line
        assert variable in line
    assert "skipped  Pipeline" in done.stdout


def test_a_missing_schema_has_its_command(variables: dict[str, str], database: str) -> None:
    """As a new database has none."""
    found = checks(variables | {"TIDEMARK_POSTGRES_DSN": database})["Postgres schema"]
    assert (found["status"], found["remedy"]) == ("failed", "Run: tidemark migrate")


def test_a_user_without_rights_is_told_which_to_ask_for(variables: dict[str, str]) -> None:
    """The statement that gives them is in the line."""
    dsn = variables["TIDEMARK_POSTGRES_DSN"]
    with psycopg.connect(dsn, autocommit=True) as sql:
        sql.execute("create role doctor_nobody login password 'x'")
        try:
            found = checks(
                variables | {"TIDEMARK_POSTGRES_DSN": make_conninfo(dsn, user="doctor_nobody", password="x")}
            )
        finally:
            sql.execute("drop role doctor_nobody")
    failed = [check for check in found.values() if check["status"] == "failed"]
    assert failed
    assert "tidemark_owner" in failed[0]["remedy"]


def test_topics_that_do_not_fit_have_their_command(variables: dict[str, str], admin: AdminClient, prefix: str) -> None:
    """A missing topic, and topics whose settings lose records."""
    compacted, brief = f"{prefix}.compacted", f"{prefix}.brief"
    made = admin.create_topics(
        [
            NewTopic(compacted, 1, 1, config={"cleanup.policy": "compact"}),
            NewTopic(brief, 1, 1, config={"retention.ms": "60000"}),
            NewTopic(f"{prefix}.deleted", 1, 1),
        ]
    )
    for future in made.values():
        future.result()
    changed = variables | {
        "TIDEMARK_KAFKA_FACTS_TOPIC": compacted,
        "TIDEMARK_KAFKA_CONTROL_TOPIC": brief,
        "TIDEMARK_KAFKA_DEAD_LETTERS_TOPIC": f"{prefix}.none",
        "TIDEMARK_KAFKA_POSITIONS_TOPIC": f"{prefix}.deleted",
    }

    def known() -> dict[str, dict[str, Any]] | None:
        found = checks(changed)
        return found if f"Topic {brief}" in found and found[f"Topic {brief}"]["status"] == "warning" else None

    found = eventually(known)
    assert found is not None
    assert found[f"Topic {compacted}"]["status"] == "failed"
    assert "cleanup.policy=delete" in found[f"Topic {compacted}"]["remedy"]
    assert "retention.ms=604800000" in found[f"Topic {brief}"]["remedy"]
    assert "cleanup.policy=compact" in found[f"Topic {prefix}.deleted"]["remedy"]
    assert found[f"Topic {prefix}.none"]["remedy"] == "Run: tidemark topics"


def test_a_redis_that_drops_keys_is_named(variables: dict[str, str]) -> None:
    """Positions must not be evicted."""
    client = redis.Redis.from_url(variables["TIDEMARK_REDIS_URL"])
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        found = checks(variables)["Redis memory"]
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.close()
    assert found["status"] == "warning"
    assert "noeviction" in found["remedy"]


def test_a_wrong_setting_is_a_failed_check() -> None:
    """It names the variable; nothing else can be checked then."""
    done = run({"TIDEMARK_SHARDS": "many"})
    assert done.exit_code == 1
    assert "failed   Settings" in done.stdout
    assert "TIDEMARK_SHARDS" in done.stdout


@pytest.mark.jvm
def test_variables_that_mislead_are_named(tmp_path: Path) -> None:
    """A mistyped setting, and what leads other programs' connections elsewhere."""
    environment = child_environment({**AWAY, "TIDEMARK_HOME": str(tmp_path), "TIDEMARK_POSTGRES_DNS": "x"})
    environment["PGHOST"] = "db.example"
    command = [sys.executable, "-m", "tidemark", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "TIDEMARK_POSTGRES_DNS (did you mean TIDEMARK_POSTGRES_DSN?) is not a setting" in done.stdout
    assert "PGHOST: set in the environment, affects PostgreSQL's client library" in done.stdout


@pytest.mark.jvm
def test_a_port_in_use_is_named() -> None:
    """With the setting that chooses another one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = checks(AWAY | {"TIDEMARK_SIDECAR_PORT": str(port), "TIDEMARK_METRICS_PORT": str(free_port())})
    assert found[f"Port {port}"]["status"] == "warning"
    assert "TIDEMARK_SIDECAR_PORT" in found[f"Port {port}"]["remedy"]


@pytest.mark.jvm
def test_a_directory_of_another_user_fails(tmp_path: Path) -> None:
    """Its setting is named."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    found = checks(AWAY | {"TIDEMARK_HOME": str(tmp_path / "home")})
    assert found["TIDEMARK_HOME"]["status"] == "failed"


@pytest.mark.jvm
def test_a_directory_in_which_nobody_can_create_a_file_fails() -> None:
    """Also for root, who has every right in /proc. It is not full."""
    found = checks(AWAY | {"TIDEMARK_HOME": "/proc/tidemark"})["TIDEMARK_HOME"]
    assert (found["status"], found["detail"]) == ("failed", "/proc cannot be written")
    assert found["remedy"] == "Set TIDEMARK_HOME to a directory that this user may write to."


@pytest.mark.jvm
def test_a_home_that_is_mounted_noexec_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no problem: the local stack works there."""
    assert "noexec" not in checks(AWAY | {"TIDEMARK_HOME": str(tmp_path)})["TIDEMARK_HOME"]["detail"]
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 30))
    found = checks(AWAY | {"TIDEMARK_HOME": str(tmp_path)})["TIDEMARK_HOME"]
    assert found["status"] == "ok"
    assert found["detail"].endswith("5.0 GiB free, mounted noexec, which Tidemark supports")


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user ID that no list of users has."""

    def lookup(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", lookup)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize(
    ("namespaces", "library", "status", "detail"),
    [
        (True, False, "ok", "user ID 54321 has no name; Postgres and Spark get a name from a user namespace"),
        (False, True, "ok", "user ID 54321 has no name; Postgres and Spark get a name from libnss_wrapper"),
        (
            False,
            False,
            "failed",
            "Postgres and Spark refuse to run as user 54321, because this user has no name",
        ),
    ],
)
def test_a_user_without_a_name_is_named(
    namespaces: bool, library: bool, status: str, detail: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the way that the local stack has, or with what is missing."""
    present = tmp_path / "libnss_wrapper.so"
    present.touch()
    monkeypatch.setattr(home, "_succeeds", lambda _: namespaces)
    monkeypatch.setattr(home, "_NSS_WRAPPER_PATTERNS", [str(present.relative_to("/"))] if library else [])
    found = doctor._check_user()
    assert (found.status, found.detail) == (status, detail)
    assert ("apt-get install libnss-wrapper" in found.remedy) == (status == "failed")


def test_root_without_setpriv_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Postgres of the local stack does not run as root."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert (doctor._check_user().status, "util-linux" in doctor._check_user().remedy) == ("warning", True)


@pytest.mark.parametrize(
    ("server", "status", "detail"),
    [
        (1000.5, "ok", "within 0.5 s of this machine"),
        (1030.0, "warning", "29 s ahead of this machine"),
        (900.0, "failed", "100 s behind this machine"),
    ],
)
def test_clocks_are_compared(server: float, status: str, detail: str) -> None:
    """A slow answer is not taken for a wrong clock."""
    found = check_clock("Redis clock", server, 1000.0, 1001.0)
    assert (found.status, found.detail) == (status, detail)
    assert check_clock("Redis clock", 1003.0, 1000.0, 1010.0).status == "ok"


def test_no_text_of_a_server_is_obeyed_by_a_terminal() -> None:
    """What a server or a variable says is printed without its escapes."""
    check = Check("Kafka", "failed", "a\x1b[2Jb")
    assert "\x1b[2J" not in check.line()
    assert "\x1b[2J" not in replace(check, remedy="\x1b[2J").line()
