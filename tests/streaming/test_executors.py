"""What Spark is told of a cluster, and what executors are sent. `tests/cluster` runs one."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from pyspark.serializers import CloudPickleSerializer

from tidemark.streaming.engine.executors import Cluster, Pods, local_address_for, write_code_archive
from tidemark.streaming.ingest.compact import compact


def test_what_a_task_runs_is_found_in_the_package_by_its_name(tmp_path: Path) -> None:
    """A function as Spark sends it, at an interpreter that has the archive and our libraries, but nothing of ours."""
    archive = write_code_archive(tmp_path)
    function = CloudPickleSerializer().dumps(partial(compact, keys=[0]))  # type: ignore[no-untyped-call]
    program = (
        "import os, pickle, sys;"
        "sys.path = [sys.argv[1], *(path for path in sys.path if not os.path.exists(f'{path}/tidemark'))];"
        "import tidemark.streaming.engine.query;"
        "print(pickle.loads(sys.stdin.buffer.read()).func.__module__, tidemark.streaming.engine.query.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(archive)], input=function, capture_output=True, check=True, timeout=60
    )
    assert done.stdout.decode().split() == [
        "tidemark.streaming.ingest.compact",
        f"{archive}/tidemark/streaming/engine/query.py",
    ]


def test_executors_are_as_many_and_as_large_on_every_kind_of_cluster() -> None:
    """Standalone clusters count cores, pods are counted; only what is set is said of pods."""
    wanted = Cluster(
        "10.0.0.1", executor_count=3, cores_per_executor=2, memory="2g", pods=Pods(image="tidemark:1", driver_pod="p-0")
    )
    settings = wanted.settings()
    assert settings["spark.cores.max"] == "6"
    assert settings["spark.executor.instances"] == "3"
    assert {name: value for name, value in settings.items() if name.startswith("spark.kubernetes")} == {
        "spark.kubernetes.container.image": "tidemark:1",
        "spark.kubernetes.driver.pod.name": "p-0",
    }


def test_executors_come_and_go_only_where_they_leave_no_state() -> None:
    """Apart, a task waits for the executor that has its state; with a store another may take it over."""
    without_store = Cluster("10.0.0.1", executor_count=2, cores_per_executor=1, memory="1g").settings()
    assert (without_store["spark.dynamicAllocation.enabled"], without_store["spark.locality.wait"]) == ("false", "60s")
    shared = Cluster(
        "10.0.0.1", executor_count=2, cores_per_executor=2, memory="1g", has_store=True, max_executors=5
    ).settings()
    assert "spark.locality.wait" not in shared
    assert shared["spark.cores.max"] == "10"
    assert [shared[f"spark.dynamicAllocation.{name}"] for name in ("minExecutors", "maxExecutors")] == ["2", "5"]


@pytest.mark.parametrize(
    "master", ["spark://127.0.0.1:7077,other:7077", "k8s://https://127.0.0.1", "spark://127.0.0.1:1"]
)
def test_executors_call_us_by_the_address_that_faces_the_master(master: str) -> None:
    """Of several masters by the first one's; nothing needs to listen there."""
    assert local_address_for(master) == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "shown"),
    [("fd00::5", "[fd00::5]"), ("[fd00::5]", "[fd00::5]"), ("10.0.0.1", "10.0.0.1"), ("p-0.p", "p-0.p")],
)
def test_the_driver_has_an_ipv6_address_in_brackets(host: str, shown: str) -> None:
    """Spark refuses the address without them, and the kernel answers without."""
    assert Cluster(host, executor_count=1, cores_per_executor=1, memory="1g").settings()["spark.driver.host"] == shown
