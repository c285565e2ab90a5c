from pathlib import Path

import pytest

from tests.terminals import shown_on_a_terminal
from tidemark.app.stack import up
from tidemark.app.stack.up import BROKER, BROKER_JARS, JarsUnavailable, fetch_jars


def _fake_java(directory: Path, script: str) -> str:
    program = directory / "java"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_the_brokers_jars_are_there(jars: Path) -> None:
    """With all that they depend on, as many as the progress bar counts."""
    assert (jars / BROKER / "kafka-clients-4.1.1.jar").exists()
    assert len([*(jars / BROKER).iterdir()]) == BROKER_JARS.jar_count


def test_second_start_downloads_nothing(jars: Path, tmp_path: Path) -> None:
    """Where the jars are what `ivy-broker.xml` asks for, not even Java is started."""
    java = _fake_java(tmp_path, "exit 9")
    fetch_jars(jars, java, say=pytest.fail)


def test_jars_of_another_version_are_fetched_again(tmp_path: Path) -> None:
    """A changed `ivy-broker.xml` removes what it no longer asks for; jars count as there only after a whole fetch."""
    old = tmp_path / BROKER / "kafka-clients-1.0.jar"
    old.parent.mkdir()
    old.touch()
    (tmp_path / "ivy-broker.sha256").write_text("of an older one")
    progress: list[str] = []
    says = "echo 'downloading https://somewhere/kafka-clients-4.1.1.jar ...'; echo more"
    fetch_jars(tmp_path, _fake_java(tmp_path, says), progress.append)
    assert not old.exists()
    assert progress == ["kafka-clients-4.1.1.jar"]
    fetch_jars(tmp_path, _fake_java(tmp_path, "exit 9"), say=pytest.fail)


FETCHING = """
import sys
from pathlib import Path
from tidemark.app.stack.up import fetch_jars
fetch_jars(Path(sys.argv[1]), sys.argv[2], lambda name: print("said", name))
"""


def test_a_terminal_gets_a_bar_over_modules_and_one_over_jars(tmp_path: Path) -> None:
    """With rate and remaining time; the name of each jar is for pipes only."""
    script = "printf '\\tfound a#b;1 in public\\n'; sleep 1; echo 'downloading https://somewhere/b-1.jar ...'"
    shown = shown_on_a_terminal(FETCHING, str(tmp_path), _fake_java(tmp_path, script))
    assert f"1/{BROKER_JARS.module_count}" in shown
    assert f"1/{BROKER_JARS.jar_count}" in shown
    assert "modules/s" in shown
    assert "jars/s" in shown
    assert "said" not in shown


def test_failed_fetch_says_what_failed_and_is_tried_again(tmp_path: Path) -> None:
    """The error has Ivy's own reason and the place of its whole output; the next start does not take it for done."""
    java = _fake_java(tmp_path, r"echo ':: UNRESOLVED DEPENDENCIES'; echo '\t\t:: a#b;1: not found'; exit 1")
    for _ in range(2):
        with pytest.raises(JarsUnavailable, match=r"a#b;1: not found.*ivy-broker\.log"):
            fetch_jars(tmp_path, java, say=pytest.fail)


def test_a_connection_that_has_died_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ivy would wait for it without a limit. What grows is waited for."""
    monkeypatch.setattr(up, "STALL_SECONDS", 2.0)
    part = tmp_path / "cache/a.jar.part"
    slow = f"mkdir -p {part.parent}; for step in 1 2 3 4; do echo {'x' * 99} >> {part}; sleep 1; done"
    java = _fake_java(tmp_path, f"if [ ! -e {tmp_path}/tried ]; then touch {tmp_path}/tried; sleep 600; fi; {slow}")
    told: list[str] = []
    fetch_jars(tmp_path, java, told.append)
    assert told == ["ivy-broker: the network sent no data, attempt 1 of 5"]


def test_a_network_that_stays_silent_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few attempts, each of which ends all of its processes."""
    monkeypatch.setattr(up, "STALL_SECONDS", 0.3)
    with pytest.raises(JarsUnavailable, match=r"the network sent no data.*ivy-broker\.log"):
        fetch_jars(tmp_path, _fake_java(tmp_path, "sleep 600"), lambda _: None)
