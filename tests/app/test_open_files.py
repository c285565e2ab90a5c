"""How many clients a sidecar serves with the files that it may open."""

import re

import pytest

from tidemark.app.serving.serve import RESERVED_FILES, ClientLimits, fit_limits
from tidemark.common.errors import BadSetting

WANTED = ClientLimits(connections=5000, open_requests=2500, line_connections=1000)


def test_enough_files_serve_all() -> None:
    """Nothing is cut, and the reserve is left over."""
    assert fit_limits(6000 + RESERVED_FILES, WANTED) == WANTED


def test_few_files_serve_fewer_of_each_kind() -> None:
    """Each kind is cut by the same factor, and probes and servers keep their files."""
    found = fit_limits(1024, WANTED)
    assert found.connections + found.line_connections + found.handshakes <= 1024 - RESERVED_FILES
    assert found.connections == 5 * found.line_connections + found.connections % found.line_connections
    assert 0 < found.open_requests <= found.connections // 2


def test_hardly_any_files_are_an_error_that_says_what_to_do() -> None:
    """A sidecar that serves nobody does not start."""
    with pytest.raises(BadSetting, match="LimitNOFILE") as refused:
        fit_limits(RESERVED_FILES + 10, WANTED)
    named = re.search(r"at least (\d+)", str(refused.value))
    assert named is not None
    fit_limits(int(named[1]), WANTED)
    with pytest.raises(BadSetting):
        fit_limits(int(named[1]) - 1, WANTED)
