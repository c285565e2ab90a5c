"""Alerts and pipeline of the incidents: what takes minutes takes a twelfth of that, by one factor.

`hastened` shortens the chart's rules; `python -m tests.incidents.hasty pipeline ...` is the pipeline, but it compares
Redis with Postgres every five seconds and not every minute, because a rule asks for what that found.
"""

import re
from functools import partial
from typing import Any

import yaml

from tidemark.app.cli import main
from tidemark.app.pipeline import supervisor
from tidemark.sinks.background import MaintenanceConfig

FASTER = 12


def hastened(rules: str) -> str:
    """A file of rules with every duration divided by `FASTER`: `for:`, ranges and offsets, and seconds that are
    compared: all numbers of two or three digits, and what the policies say."""
    groups: dict[str, Any] = yaml.safe_load(rules)
    for group in groups["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"(?<=[<>] )\d{2,3}\b", lambda found: f"{int(found[0]) / FASTER:g}", rule["expr"])
            rule["expr"] = re.sub(r"\b\d+[smh]\b", _shortened, rule["expr"])
            rule["expr"] = re.sub(r"tidemark_policy_\w+_seconds({.*?})?", rf"(\g<0> / {FASTER})", rule["expr"])
            if "for" in rule:
                rule["for"] = re.sub(r"\d+[smh]", _shortened, rule["for"])
    text: str = yaml.safe_dump(groups)
    return text


def _shortened(duration: re.Match[str]) -> str:
    seconds = int(duration[0][:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[0][-1]]
    return f"{seconds * 1000 // FASTER}ms"


if __name__ == "__main__":
    replaced = "MaintenanceConfig"
    setattr(supervisor, replaced, partial(MaintenanceConfig, compare_seconds=60 / FASTER))
    main()
