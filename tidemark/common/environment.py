"""Environment variables and output of child processes, and the directory for Tidemark's files.

A server of the local stack gets only the variables that it needs. The server does not inherit `PGHOST`, proxies or JVM
options from the user's shell, because the user set them for other programs. `failure_cause` searches the output of a
program for the reason why the program ended.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

PREFIX = "TIDEMARK_"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1", "[::1]")
# The JVM reads and writes file names in the encoding of the locale.
LOCALE = "C.UTF-8" if sys.platform.startswith("linux") else "en_US.UTF-8"

_BASE_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ")
_PYTHON_VARIABLES = (
    "JAVA_HOME",
    "NO_COLOR",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "PYTHONUSERBASE",
    "PYTHONNOUSERSITE",
)
_SETTING_PATTERN = re.compile(rf"{PREFIX}\w+|OTEL_\w+")


class VariableGroup(StrEnum):
    """Groups of environment variables, by the programs that read them. The value names these programs in messages."""

    POSTGRES = "PostgreSQL's client library"
    PROXY = "requests over HTTP"
    JAVA = "every Java virtual machine"
    SPARK = "Spark"
    PYTHON = "Python"


_PATTERNS: Mapping[VariableGroup, re.Pattern[str]] = {
    VariableGroup.POSTGRES: re.compile(r"PG[A-Z]+"),
    VariableGroup.PROXY: re.compile(r"(https?|ftp|all)_proxy", re.IGNORECASE),
    VariableGroup.JAVA: re.compile(r"(JAVA_TOOL|_JAVA|JDK_JAVA)_OPTIONS|CLASSPATH|KAFKA_\w*OPTS"),
    VariableGroup.SPARK: re.compile(r"(SPARK|PYSPARK)_\w+|(HADOOP|YARN|HIVE)_CONF_DIR|BASH_ENV"),
    VariableGroup.PYTHON: re.compile(r"PYTHON(HOME|STARTUP|WARNINGS|INSPECT|OPTIMIZE|DEVMODE|BREAKPOINT)"),
}


def foreign_variables(
    groups: Iterable[VariableGroup] = tuple(VariableGroup), environment: Mapping[str, str] | None = None
) -> dict[VariableGroup, list[str]]:
    """Find variables that may misconfigure one of Tidemark's servers.

    Args:
        groups: the groups to search for.
        environment: the variables to search; None: the environment of this process.

    Returns:
        The names of the variables of each group, sorted. Groups without variables are left out.
    """
    names = sorted(os.environ if environment is None else environment)
    matching = {group: [name for name in names if _PATTERNS[group].fullmatch(name)] for group in groups}
    return {group: variables for group, variables in matching.items() if variables}


def remove_foreign_variables(
    groups: Iterable[VariableGroup], environment: MutableMapping[str, str] | None = None
) -> list[str]:
    """Remove the variables of `groups` from an environment.

    Args:
        groups: the groups to remove.
        environment: the variables to change; None: `os.environ`, so the C libraries of this process lose them too.

    Returns:
        The names of the removed variables, sorted.
    """
    changed = os.environ if environment is None else environment
    names = sorted(name for variables in foreign_variables(groups, changed).values() for name in variables)
    for name in names:
        del changed[name]
    return names


def bypass_proxies_for_loopback(environment: MutableMapping[str, str] | None = None) -> None:
    """Add `LOOPBACK_NAMES` to `no_proxy` if a proxy is set, so that requests to this machine use no proxy.

    `environment`: the variables to change; None: the environment of this process.
    """
    changed = os.environ if environment is None else environment
    if not foreign_variables([VariableGroup.PROXY], changed):
        return
    present = changed.get("no_proxy") or changed.get("NO_PROXY") or ""
    names = [name.strip() for name in present.split(",") if name.strip()]
    if "*" not in names:
        names += [name for name in LOOPBACK_NAMES if name not in names]
    changed["no_proxy"] = changed["NO_PROXY"] = ",".join(names)


def server_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The complete environment of a third-party server (Kafka, Postgres, Redis).

    Contains basic variables of this process such as PATH and HOME, a UTF-8 locale, and `variables`.
    """
    inherited = {name: os.environ[name] for name in _BASE_VARIABLES if os.environ.get(name)}
    return {"PATH": os.defpath, **inherited, "LANG": LOCALE, "LC_ALL": LOCALE, **(variables or {})}


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The complete environment of a Tidemark process.

    Contains `server_environment()`, `_PYTHON_VARIABLES`, all settings of Tidemark and OpenTelemetry, and `variables`.
    Contains PYTHONPATH if this package was found through it. An entry of `variables` replaces the setting of the same
    name, and also its `..._FILE` variable.
    """
    replaced = {*variables, *(f"{name}_FILE" for name in variables)}
    inherited = {
        name: text for name, text in os.environ.items() if name in _PYTHON_VARIABLES or _SETTING_PATTERN.fullmatch(name)
    }
    if _is_on_pythonpath():
        inherited["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return server_environment(
        {name: text for name, text in inherited.items() if name not in replaced} | dict(variables)
    )


def _is_on_pythonpath() -> bool:
    """Whether PYTHONPATH has the folder that contains this package. If so, a child process needs PYTHONPATH too."""
    package = Path(__file__).absolute().parents[1]
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return any(Path(entry).resolve() == package.parent.resolve() for entry in entries)


def default_home() -> Path:
    """The directory for Tidemark's files if TIDEMARK_HOME is not set. Does not create the directory.

    `~/.cache/tidemark`; or `temporary_home()` if this user has no home directory, or may not create this path
    (`is_writable`).
    """
    with suppress(RuntimeError):  # neither HOME nor an entry in the list of users
        home = os.environ.get("HOME") or Path("~").expanduser()
        if home and (path := Path(home, ".cache", "tidemark").absolute()) and is_writable(path):
            return path
    return temporary_home()


def temporary_home() -> Path:
    """The path of this user's directory for Tidemark's files in the system's temporary directory.

    Does not create the directory. Another user may have created it: see `is_trusted`.
    """
    return Path(tempfile.gettempdir(), f"tidemark-{os.getuid()}")


def is_trusted(path: Path) -> bool:
    """Whether `path` is outside `temporary_home()`, belongs to this user or does not exist."""
    try:
        return not path.is_relative_to(temporary_home()) or path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True


def is_writable(path: Path) -> bool:
    """Whether this user may create files in `path`, or in its nearest existing parent if `path` does not exist.

    Tries to create a temporary file. True if the file system is full: the program that writes the files reports this.
    """
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return False
    try:
        # `os.access` allows everything to root, but even root cannot create a file in a file system such as /proc.
        tempfile.TemporaryFile(dir=existing).close()
    except (FileNotFoundError, PermissionError):
        return False
    except OSError:  # for example a full disk
        return True
    return True


MAX_CAUSE_LENGTH = 400
"""Maximum length of a cause in characters."""

_NOISE = re.compile(
    r"\s*at [\w.$/<>@]+\(.*\)|\s*\.\.\. \d+ (more|common frames)|Traceback \(most recent call last\):"
    r"|\s+File \".*\", line .*|\s+[\^~]+\s*|(NOTE: )?Picked up \w+:.*"
    r"|Error: Could not create the Java Virtual Machine\."
    r"|Error: A fatal exception has occurred\. Program will exit\.|\s*"
)
_TIMESTAMP = re.compile(
    r"\[?\d\d(\d\d)?[-/]\d\d[-/]\d\d[T ][\d:.,]+(Z| \w{3,4})?\]? *(\[\d+\] *)?"
    r"(\[?(FATAL|ERROR|WARN|error|critical) *\]?:? +)?"
)
_JVM_INITIALIZATION_ERROR = "Error occurred during initialization of VM"
_PROBLEM_WORD = re.compile(
    r"fatal|panic|error|exception|unrecognized|conflicting|cannot|could not|failed|refused|denied|no such|not found",
    re.IGNORECASE,
)


def is_noise(line: str) -> bool:
    """Whether a line of output is blank, a stack frame, or general advice, and so names no cause."""
    return _NOISE.fullmatch(line) is not None


def failure_cause(lines: Iterable[str]) -> str:
    """Find in the lines of a program's output why the program ended.

    Chooses the line after "Error occurred during initialization of VM"; or else the innermost cause of a Java
    exception; or else the last line with a word such as "error"; or else the last line. Ignores noise (`is_noise`).

    Returns:
        The cause, as one line of at most `MAX_CAUSE_LENGTH` characters, without a time stamp; empty if all lines are
        noise.
    """
    messages = [line.strip() for line in lines if not is_noise(line)]
    if not messages:
        return ""
    causes = [line for line in messages if line.startswith("Caused by:")]
    problems = [line for line in messages if _PROBLEM_WORD.search(line)]
    chosen = (causes or problems or messages)[-1]
    if _JVM_INITIALIZATION_ERROR in messages:  # the next line names the problem
        chosen = " ".join(messages[messages.index(_JVM_INITIALIZATION_ERROR) :][1:2]) or _JVM_INITIALIZATION_ERROR
    text = _TIMESTAMP.sub("", chosen, count=1).removeprefix("Caused by:").strip()
    text = re.sub(r'^Exception in thread "[^"]*" ', "", text)
    return text if len(text) <= MAX_CAUSE_LENGTH else f"{text[: MAX_CAUSE_LENGTH - 3]}..."
