"""Fixtures by concern live in `fix_*.py`; this file only names them."""

import gc
import signal
from collections.abc import Iterator

import pytest

from tidemark.common.environment import VariableGroup, bypass_proxies_for_loopback, remove_foreign_variables

# A developer's own settings for Postgres, and a proxy, are not for the servers of the tests.
remove_foreign_variables([VariableGroup.POSTGRES])
bypass_proxies_for_loopback()

pytest_plugins = [
    "tests.examples",
    "tests.needs",
    "tests.fix_cli_output",
    "tests.fix_logs",
    "tests.fix_servers",
    "tests.fix_sinks",
    "tests.fix_pipeline",
    "tests.fix_stack",
    "tests.fix_tls",
    "tests.fix_redis",
    "tests.fix_synapse",
    "tests.fix_kafka",
    "tests.fix_spark",
]

# Too long for every run; named, they run: `make cluster-test`, `make model-check`, `make chaos`, `make e2e-incidents`.
collect_ignore = [
    "cluster",
    "chaos",
    "model_check",
    *(f"incidents/test_{it}.py" for it in ("blocked", "restored", "servers")),
]

# In the background of a script SIGINT is ignored, and would be in every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is loaded and collected stays to the end: a tenth of `make test-unit` went into looking through it for
    cycles, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
