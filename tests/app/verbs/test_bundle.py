"""`tidemark bundle`: one archive that a person can send, whatever of the servers answers."""

import json
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.app.sidecar.given import At, moved
from tests.sinks.reader.given import Pipeline
from tidemark.app.cli import main
from tidemark.common.environment import child_environment
from tidemark.sinks.postgres.status import TABLES

NO_POSITION = "http://127.0.0.1:1/metrics"
ALL_AWAY = {
    "TIDEMARK_POSTGRES_DSN": "postgresql://ada:geheim@127.0.0.1:1/tidemark",
    "TIDEMARK_REDIS_URL": "redis://ada:geheim@127.0.0.1:1/0",
    "TIDEMARK_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
}


def bundle(variables: Mapping[str, str], *words: str) -> Result:
    return CliRunner(env=dict(variables)).invoke(main, ["bundle", *words, "--metrics", NO_POSITION])


def contents(file: Path) -> dict[str, str]:
    """By name, all below one folder that is called as the file is."""
    folder = f"{file.name.removesuffix('.tar.gz')}/"
    found = {}
    with tarfile.open(file) as archive:
        for member in archive.getmembers():
            assert member.name.startswith(folder)
            content = archive.extractfile(member)
            assert content is not None
            found[member.name.removeprefix(folder)] = content.read().decode()
    return found


def test_a_bundle_has_positions_gaps_and_what_each_server_says(
    pipeline: Pipeline, redis_url: str, dsn: str, tmp_path: Path
) -> None:
    """Of each table the newest rows; what does not answer is named, and hides nothing else."""
    pipeline.publish(moved("s", 7, w=At(0, 7)))
    file = tmp_path / "night.tar.gz"
    done = bundle({"TIDEMARK_REDIS_URL": redis_url, "TIDEMARK_POSTGRES_DSN": dsn}, str(file))
    assert done.exit_code == 0, done.output
    found = contents(file)
    missing = json.loads(found.pop("missing.json"))
    assert missing.keys() <= {"metrics-1.txt", "kafka.json"}  # this site has no topics
    assert done.output.startswith("missing ")
    assert found.keys() >= {f"postgres/{table}.json" for table in TABLES} | {
        "versions.json",
        "settings.txt",
        "gaps.json",
    }
    assert json.loads(found["status.json"])["streams"][0]["linear"] == 7
    assert json.loads(found["redis.json"])["s"]["linear"] == 7
    [advance] = json.loads(found["postgres/position_advances.json"])
    assert (advance["writer"], advance["id"]) == ("w", 7)


@pytest.mark.server  # needs none, and waits three seconds for those that are away
def test_a_bundle_is_written_where_nothing_answers_and_tells_no_password(tmp_path: Path) -> None:
    """For programs it says the same as JSON."""
    file = tmp_path / "night.tar.gz"
    done = bundle(ALL_AWAY, str(file), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert set(told["parts"]) == {"versions.json", "settings.txt", "missing.json"}
    assert {"status.json", "redis.json", "kafka.json", "postgres/streams.json"} <= told["problems"].keys()
    assert "geheim" not in "".join(contents(file).values()) + done.output


def test_a_bundle_replaces_no_file(tmp_path: Path) -> None:
    """The one of last night is not lost to a name that was typed twice."""
    file = tmp_path / "night.tar.gz"
    file.write_text("precious")
    done = bundle({}, str(file))
    assert done.exit_code == 1
    assert done.output.endswith("night.tar.gz: File exists\n")
    assert file.read_text() == "precious"


@pytest.mark.server  # needs none, and waits three seconds for those that are away
def test_a_bundle_that_does_not_fit_leaves_no_file(tmp_path: Path) -> None:
    """Half of an archive would be sent for a whole one, and stand in the way of the next."""
    file = tmp_path / "night.tar.gz"
    # -B: a compiled module cut off at that limit would stay, and stop every later import of it.
    command = f"ulimit -f 1; exec {shlex.quote(sys.executable)} -B -m tidemark.app.cli bundle {shlex.quote(str(file))}"
    done = subprocess.run(
        ["sh", "-c", command], env=child_environment(ALL_AWAY), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, f"Error: cannot write {file}: File too large\n")
    assert not file.exists()
