"""Users whom the machine does not know, as platforms draw them for containers."""

import os
import pwd
from pathlib import Path

import pytest

from tidemark.app.stack import home
from tidemark.app.stack.home import NamedUser, NeedsNamedUser, find_named_user


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", lookup)


def test_a_user_with_a_name_needs_nothing(tmp_path: Path) -> None:
    """As nearly everybody has."""
    assert find_named_user(tmp_path) == NamedUser()


@pytest.mark.usefixtures("unknown")
def test_without_user_namespaces_a_library_gives_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Containers often have no namespaces of their own."""
    monkeypatch.setattr(home, "_succeeds", lambda command: False)
    library = tmp_path / "libnss_wrapper.so"
    library.touch()
    monkeypatch.setattr(home, "_NSS_WRAPPER_PATTERNS", [str(library.relative_to("/"))])
    user = find_named_user(tmp_path)
    assert user.command_prefix == ()
    assert user.variables["LD_PRELOAD"] == str(library)
    line = Path(user.variables["NSS_WRAPPER_PASSWD"]).read_text()
    assert line.split(":")[2:4] == [str(os.geteuid()), str(os.getegid())]


@pytest.mark.usefixtures("unknown")
def test_without_either_a_person_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one line, before anything is started."""
    monkeypatch.setattr(home, "_succeeds", lambda command: False)
    monkeypatch.setattr(home, "_NSS_WRAPPER_PATTERNS", [])
    with pytest.raises(NeedsNamedUser, match=f"refuse to run as user {os.geteuid()}, because this user has no name"):
        find_named_user(tmp_path)
