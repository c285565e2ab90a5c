"""What `import tidemark` gives, costs, and says where a library is missing."""

import json
import subprocess
import sys

import pytest

import tidemark
from tidemark import errors
from tidemark.sinks import reader
from tidemark.sources import writer

HEAVY = {"confluent_kafka", "numpy", "pandas", "psycopg", "pyarrow", "pyspark", "redis"}


def _python(program: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_importing_is_quick_and_loads_no_library_of_others() -> None:
    """Under 100 ms of a core, errors included; the least of five, because other tests share the core's caches."""
    program = (
        "import json, sys, time; began = time.process_time(); import tidemark.errors;"
        "print(json.dumps([time.process_time() - began, *{name.partition('.')[0] for name in sys.modules}]))"
    )
    runs = [json.loads(_python(program)) for _ in range(5)]
    assert min(seconds for seconds, *_ in runs) < 0.1
    assert HEAVY.isdisjoint(runs[0])


@pytest.mark.parametrize(
    ("names", "unused"),
    [
        ("Writer, AsyncWriter", {"confluent_kafka", "numpy", "pandas", "pyarrow", "pyspark", "redis"}),
        ("Reader, AsyncReader, Positions, Token", {"confluent_kafka", "numpy", "pandas", "pyarrow", "pyspark"}),
    ],
)
def test_a_library_loads_nothing_of_another_role(names: str, unused: set[str]) -> None:
    """Also where everything is installed: a service that writes pays for no arrays."""
    loaded = _python(f"import sys; from tidemark import {names}; print(*sys.modules)").split()
    assert unused.isdisjoint(loaded)


def test_everything_that_the_libraries_offer_is_offered() -> None:
    """Whoever follows the documentation needs no deeper import."""
    offered = {*reader.__all__, "AsyncWriter", "RedisAddress", "Writer", "errors"}
    assert set(tidemark.__all__) == offered
    assert all(getattr(tidemark, name) for name in offered)
    assert dir(tidemark) == sorted(tidemark.__all__)
    assert tidemark.Writer is writer.Writer


def test_every_error_can_be_caught() -> None:
    """What `tidemark.errors` offers are the errors that are raised and the way a program ends by one, and it offers
    nothing else."""
    from tidemark.common import errors as raised

    tree = {name: value for name, value in vars(raised).items() if _is_error(value)}
    offered = {name: value for name, value in vars(errors).items() if not name.startswith("__")}
    assert offered == {**tree, "exit_on_error": raised.exit_on_error}


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, errors.TidemarkError)


def test_other_names_are_missing_as_anywhere() -> None:
    with pytest.raises(AttributeError, match="module 'tidemark' has no attribute 'Wrtier'"):
        getattr(tidemark, "Wrtier")  # noqa: B009 - type checkers see through the other way
    with pytest.raises(ImportError, match="cannot import name 'Wrtier'"):
        exec("from tidemark import Wrtier", {})  # noqa: S102 - so does this


def test_a_module_of_ours_that_is_missing_is_no_missing_extra() -> None:
    """A broken installation is not mended by an extra: its error stays as it is."""
    broken = ModuleNotFoundError("No module named 'tidemark.sinks.nothing'", name="tidemark.sinks.nothing")
    with pytest.raises(ModuleNotFoundError) as raised:
        errors.ExtraMissing.for_import_error(broken, "tidemark.Reader", "reader")
    assert raised.value is broken
