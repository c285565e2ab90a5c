"""Processes that a test starts to kill them. They are forked from one that has imported what they run, which takes a
second each time otherwise; it has no threads, and nothing of the test's own process but what it is given.
"""

import multiprocessing

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    [
        "tests.app.test_follow_positions",
        "tests.sinks.test_publisher",
        "tests.sinks.postgres.test_lease",
        "tests.sinks.reader.test_read_kill",
    ]
)
