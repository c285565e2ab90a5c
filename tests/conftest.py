"""Fixtures by concern live in `fix_*.py`; this file only names them."""

pytest_plugins = [
    "tests.fix_servers",
    "tests.fix_sinks",
    "tests.fix_pipeline",
    "tests.fix_stack",
    "tests.fix_tls",
    "tests.fix_redis",
    "tests.fix_kafka",
]

# Too long for every run; named, it runs: `make cluster-test`.
collect_ignore = ["cluster"]
