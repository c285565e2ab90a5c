"""The page in docs/ names tests that exist."""

import ast
import re
from pathlib import Path

from tidemark.streaming.wire.line_protocol import RELAYED_COMMANDS

PAGE = Path("docs/reference/protocol.md").read_text()
HERE = Path(__file__).parent


def test_every_rule_has_its_test() -> None:
    """Each line of the conformance table names a test that is there."""
    lines = PAGE.partition("## Conformance")[2].splitlines()
    rules = [line for line in lines if line.startswith("| ") and not line.startswith("| rule")]
    assert len(rules) > 40
    for rule in rules:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", rule)
        assert named, rule
        for file, name in named:
            tree = ast.parse((HERE / file).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, rule


def test_every_relayed_command_is_in_the_table() -> None:
    """None is forgotten."""
    for word in RELAYED_COMMANDS:
        assert word in PAGE
