"""The local stack in each shell of the matrix alone: `make environments-test`."""

from pathlib import Path

import pytest

from tests.app.environments import can_mount, cases
from tests.app.fix_environments import shell

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("name", [*cases(Path("/tmp"))])
def test_the_stack_is_ready_twice_and_found(name: str, jars: Path, tmp_path: Path) -> None:
    """psql and `tidemark status` find it from the same shell, and the second start finds the data of the first."""
    case = cases(tmp_path)[name]
    if (case.noexec or case.uid) and not can_mount():
        pytest.skip("needs root, and mounts of one's own")
    with shell(case, jars) as user:
        with user.up():
            if not case.noexec:  # whose home nobody else sees
                user.use()
        with user.up():
            assert case.noexec or "sales" in user.status()
