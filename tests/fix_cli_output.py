"""What any test has a verb print with `--json` conforms to the verb's schema in docs/reference/schemas/cli."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from click.testing import CliRunner, Result


@pytest.fixture(scope="session", autouse=True)
def cli_outputs_conform() -> Iterator[None]:
    """Compare the output of each call in this process. `invoke` gives an output only after it was compared."""
    invoke = CliRunner.invoke

    def compared(self: CliRunner, cli: Any, args: Any = None, *rest: Any, **options: Any) -> Result:
        result = invoke(self, cli, args, *rest, **options)
        if not isinstance(args, str) and "--json" in (args or ()):
            from tidemark.app.cli import main

            if cli is main:
                _compare([*args], result.stdout)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CliRunner, "invoke", compared)
        yield


def _compare(words: Sequence[str], printed: str) -> None:
    from tests.contracts.cli_schemas import OUTPUTS, PER_LINE
    from tests.contracts.test_cli_schemas import strict_validator

    if not printed.startswith("{"):
        return  # the command failed
    verb = next(verb for verb in (" ".join(words[:3]), " ".join(words[:2]), words[0]) if verb in OUTPUTS)
    for text in printed.splitlines() if verb in PER_LINE else [printed]:
        strict_validator(verb).validate(json.loads(text))
