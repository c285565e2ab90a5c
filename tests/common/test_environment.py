"""What child processes get of the environment, and what is removed from it."""

import os
from pathlib import Path

import pytest

from tests.app.environments import variables
from tidemark.common.environment import (
    LOCALE,
    VariableGroup,
    bypass_proxies_for_loopback,
    child_environment,
    foreign_variables,
    remove_foreign_variables,
    server_environment,
)

MISLEADING = {
    VariableGroup.POSTGRES: ["PGDATESTYLE", "PGHOSTADDR", "PGOPTIONS", "PGSERVICE", "PGSSLMODE"],
    VariableGroup.PROXY: ["ALL_PROXY", "http_proxy", "https_proxy"],
    VariableGroup.JAVA: ["CLASSPATH", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "KAFKA_OPTS", "_JAVA_OPTIONS"],
    VariableGroup.SPARK: [
        "HADOOP_CONF_DIR",
        "PYSPARK_SUBMIT_ARGS",
        "SPARK_CONF_DIR",
        "SPARK_HOME",
        "SPARK_SUBMIT_OPTS",
    ],
    VariableGroup.PYTHON: ["PYTHONHOME", "PYTHONSTARTUP", "PYTHONWARNINGS"],
}
ALL = [name for names in MISLEADING.values() for name in names]


@pytest.mark.parametrize("name", sorted({*ALL, *variables(Path())}))
def test_no_child_inherits_a_variable_for_other_servers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a server of the stack nor a process of Tidemark sees it."""
    monkeypatch.setenv(name, "anything")
    assert name not in server_environment()
    assert name not in child_environment({})


@pytest.mark.parametrize("group", VariableGroup)
def test_misleading_variables_are_found_by_group_and_removed(group: VariableGroup) -> None:
    """Those of other groups, and Tidemark's own, stay."""
    environment = dict.fromkeys([*ALL, "TIDEMARK_POSTGRES_DSN", "PATH", "PAGER", "JAVA_HOME", "no_proxy"], "x")
    assert foreign_variables([group], environment) == {group: sorted(MISLEADING[group])}
    assert remove_foreign_variables([group], environment) == sorted(MISLEADING[group])
    assert foreign_variables([group], environment) == {}
    assert len(environment) == len(ALL) + 5 - len(MISLEADING[group])


def test_a_child_of_ours_has_our_settings_and_what_finds_java_and_collectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has neither. Both have a locale in which every file name can be written."""
    monkeypatch.setenv("LC_ALL", "C")
    given = {"TIDEMARK_SHARDS": "3", "JAVA_HOME": "/java", "OTEL_EXPORTER_OTLP_HEADERS": "a=b", "EDITOR": "vi"}
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    child, server = child_environment({"TIDEMARK_OWNER": "me"}), server_environment({"PGPORT": "1"})
    assert {name: child.get(name) for name in given} == {**given, "EDITOR": None}
    assert child["TIDEMARK_OWNER"] == "me"
    assert not server.keys() & given.keys()
    assert server["PGPORT"] == "1"
    assert child["LC_ALL"] == server["LC_ALL"] == LOCALE
    assert child["PATH"] == server["PATH"] == os.environ["PATH"]


def test_without_a_path_a_child_has_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server finds `sh`, also if the shell had no PATH."""
    monkeypatch.delenv("PATH")
    assert server_environment()["PATH"] == os.defpath


def test_pythonpath_is_inherited_only_if_this_package_was_found_by_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then its libraries may be there as well."""
    import tidemark

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "PYTHONPATH" not in child_environment({})
    ours = os.pathsep.join([str(tmp_path), str(Path(tidemark.__path__[0]).parent)])
    monkeypatch.setenv("PYTHONPATH", ours)
    assert child_environment({})["PYTHONPATH"] == ours


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"http_proxy": "http://proxy:3128"}, "127.0.0.1,localhost,::1,[::1]"),
        ({"HTTPS_PROXY": "p", "NO_PROXY": "intra, localhost"}, "intra,localhost,127.0.0.1,::1,[::1]"),
        ({"http_proxy": "p", "no_proxy": "*"}, "*"),
        ({}, None),
    ],
)
def test_requests_to_this_machine_bypass_the_proxy(given: dict[str, str], expected: str | None) -> None:
    """What the user excepted besides stays; without a proxy nothing is set."""
    environment = dict(given)
    bypass_proxies_for_loopback(environment)
    assert environment.get("no_proxy") == expected
    assert environment.get("NO_PROXY") == expected
