"""Results as files: one JSON per measure, with the machine and the command that gave it."""

import os
import platform
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil

DIRECTORY = Path(__file__).parent / "results"
_PACKAGES = ("pyspark", "confluent-kafka", "msgspec", "pyarrow", "numpy", "quixstreams", "orjson")


class Machine(msgspec.Struct, frozen=True):
    cores: int
    memory_gib: float
    processor: str
    system: str
    python: str
    java: str
    packages: dict[str, str]

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {number}" for name, number in self.packages.items())
        return (
            f"{self.cores} cores ({self.processor}), {self.memory_gib:.0f} GiB, {self.system};"
            f" Python {self.python}, Java {self.java}, {packages}"
        )


class Result(msgspec.Struct, frozen=True):
    """`figures` is what the measure called `name` found; only that measure knows its shape."""

    name: str
    command: str
    date: str
    machine: Machine
    figures: dict[str, Any]


def machine(java: str) -> Machine:
    """`java` is the program."""
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    return Machine(
        cores=os.cpu_count() or 1,
        memory_gib=psutil.virtual_memory().total / (1 << 30),
        processor=_processor(),
        system=f"{platform.system()} {platform.release().split('-')[0]}",
        python=platform.python_version(),
        java=answer.split('"')[1],
        packages=dict(_installed()),
    )


def save(name: str, arguments: list[str], on: Machine, figures: dict[str, Any]) -> None:
    command = shlex.join(["python", "-m", "tests.bench", *arguments])
    result = Result(name, command, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), on, figures)
    DIRECTORY.mkdir(exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=2)
    (DIRECTORY / f"{name}.json").write_bytes(encoded + b"\n")


def load(name: str) -> Result | None:
    path = DIRECTORY / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=Result) if path.exists() else None


def _installed() -> Iterator[tuple[str, str]]:
    """Those of the competitors are only there with the extra `bench`."""
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def _processor() -> str:
    """The model's name where Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
