"""Bearer tokens in a file that is changed under a running process."""

import os
from pathlib import Path

import pytest

from tidemark.app.serving.tls_listener import FILE_CHECK_INTERVAL_SECONDS
from tidemark.app.sidecar.app import BearerTokens
from tidemark.common.errors import BadSetting


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("# of the dashboards\none\n\ntwo\n")
    return path


def test_each_listed_token_opens(path: Path, clock: Clock) -> None:
    """Several tokens count at once, so that they can be rotated; everything else stays outside."""
    tokens = BearerTokens(path, clock)
    assert tokens.is_authorized("Bearer one")
    assert tokens.is_authorized("bearer two")
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer three", "Basic one", "one", "Bearer # of the dashboards"):
        assert not tokens.is_authorized(wrong)


def test_changed_file_counts_without_a_restart(path: Path, clock: Clock) -> None:
    """A token that was taken out is refused about a second later, and a new one is taken; a swapped file counts too."""
    tokens = BearerTokens(path, clock)
    path.write_text("three\n")
    clock.now += FILE_CHECK_INTERVAL_SECONDS
    assert not tokens.is_authorized("Bearer one")
    assert tokens.is_authorized("Bearer three")
    (path.parent / "new").write_text("fours\n")
    (path.parent / "new").rename(path)
    clock.now += FILE_CHECK_INTERVAL_SECONDS
    assert tokens.is_authorized("Bearer fours")


def test_lost_file_changes_nothing(path: Path, clock: Clock) -> None:
    """While the file is away or cannot be read, the last tokens stay: neither everybody nor nobody comes in."""
    tokens = BearerTokens(path, clock)
    path.unlink()
    clock.now += FILE_CHECK_INTERVAL_SECONDS
    assert tokens.is_authorized("Bearer one")
    assert not tokens.is_authorized("Bearer three")


def test_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    """A sidecar never starts unguarded because its file is missing."""
    with pytest.raises(BadSetting, match="TIDEMARK_SIDECAR_TOKENS_FILE: cannot read"):
        BearerTokens(tmp_path / "nowhere")


def test_empty_file_lets_nobody_in(path: Path, clock: Clock) -> None:
    """No token in the file means nobody, never everybody."""
    path.write_text("# none yet\n")
    os.utime(path)
    assert not BearerTokens(path, clock).is_authorized("Bearer ")
