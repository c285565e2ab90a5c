from pathlib import Path

import pytest

from tidemark.app.versions import JavaUnfit, find_java


def test_java_that_is_too_old_is_named(tmp_path: Path) -> None:
    """One line names the Java that was found, the version that is needed, and how to get it."""
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("""#!/bin/sh\necho 'openjdk version "1.8.0_412"' >&2\n""")
    program.chmod(0o755)
    with pytest.raises(JavaUnfit, match=r"Tidemark needs Java 17 or newer, but .* is Java 8: install Java") as caught:
        find_java(tmp_path)
    assert str(program) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_java_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any Java the line says how to get one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaUnfit, match="there is no java on the PATH: install Java"):
        find_java(None)
