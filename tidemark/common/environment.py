"""Environment variables and output of child processes, and the directory of Tidemark's files.

A server of the local stack gets only the variables that it needs. Nothing else is inherited: a `PGHOST`, a proxy or JVM
options in the user's shell are meant for other programs. `default_home` is a directory that this user may write to.
`failure_cause` finds the line of a program's output that says why the program ended.
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

_BASE = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ")
_PYTHON = ("JAVA_HOME", "NO_COLOR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONUSERBASE", "PYTHONNOUSERSITE")
_SETTINGS = re.compile(rf"{PREFIX}\w+|OTEL_\w+")


class Foreign(StrEnum):
    """Groups of variables, by the program that reads them."""

    POSTGRES = "PostgreSQL's client library"
    PROXY = "requests over HTTP"
    JAVA = "every Java virtual machine"
    SPARK = "Spark"
    PYTHON = "Python"


_PATTERNS: Mapping[Foreign, re.Pattern[str]] = {
    Foreign.POSTGRES: re.compile(r"PG[A-Z]+"),
    Foreign.PROXY: re.compile(r"(https?|ftp|all)_proxy", re.IGNORECASE),
    Foreign.JAVA: re.compile(r"(JAVA_TOOL|_JAVA|JDK_JAVA)_OPTIONS|CLASSPATH|KAFKA_\w*OPTS"),
    Foreign.SPARK: re.compile(r"(SPARK|PYSPARK)_\w+|(HADOOP|YARN|HIVE)_CONF_DIR|BASH_ENV"),
    Foreign.PYTHON: re.compile(r"PYTHON(HOME|STARTUP|WARNINGS|INSPECT|OPTIMIZE|DEVMODE|BREAKPOINT)"),
}


def foreign_variables(
    groups: Iterable[Foreign] = tuple(Foreign), environment: Mapping[str, str] | None = None
) -> dict[Foreign, list[str]]:
    """Find variables that would misconfigure one of Tidemark's servers.

    Args:
        environment: variables to search; None: those of this process.

    Returns:
        For each group its variables, sorted by name. Groups without variables are left out.
    """
    names = sorted(os.environ if environment is None else environment)
    matching = {group: [name for name in names if _PATTERNS[group].fullmatch(name)] for group in groups}
    return {group: variables for group, variables in matching.items() if variables}


def forget(groups: Iterable[Foreign], environment: MutableMapping[str, str] | None = None) -> list[str]:
    """Remove the foreign variables of `groups`.

    Args:
        environment: variables to change; None: those of this process and its C libraries.

    Returns:
        The names of the removed variables, sorted.
    """
    changed = os.environ if environment is None else environment
    names = sorted(name for variables in foreign_variables(groups, changed).values() for name in variables)
    for name in names:
        del changed[name]
    return names


def bypass_proxies_for_loopback(environment: MutableMapping[str, str] | None = None) -> None:
    """Add the loopback names to `no_proxy`, so that no HTTP client sends a request to this machine through a proxy."""
    changed = os.environ if environment is None else environment
    if not foreign_variables([Foreign.PROXY], changed):
        return
    present = changed.get("no_proxy") or changed.get("NO_PROXY") or ""
    names = [name.strip() for name in present.split(",") if name.strip()]
    if "*" not in names:
        names += [name for name in LOOPBACK_NAMES if name not in names]
    changed["no_proxy"] = changed["NO_PROXY"] = ",".join(names)


def server_environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The complete environment of a third-party server (Kafka, Postgres, Redis), with `variables` added."""
    inherited = {name: os.environ[name] for name in _BASE if os.environ.get(name)}
    return {"PATH": os.defpath, **inherited, "LANG": LOCALE, "LC_ALL": LOCALE, **(variables or {})}


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The complete environment of a Tidemark process.

    Contains the environment of a server, the variables that locate this Python and its modules, and all settings of
    Tidemark. `variables` replace settings, also those that come from a file (`..._FILE`).
    """
    replaced = {*variables, *(f"{name}_FILE" for name in variables)}
    ours = {name: text for name, text in os.environ.items() if name in _PYTHON or _SETTINGS.fullmatch(name)}
    if _is_found_by_path():
        ours["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return server_environment({name: text for name, text in ours.items() if name not in replaced} | dict(variables))


def _is_found_by_path() -> bool:
    """True if Python found this package through PYTHONPATH, which a child process then needs too."""
    package = Path(__file__).absolute().parents[1]
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return any(Path(entry).resolve() == package.parent.resolve() for entry in entries)


def default_home() -> Path:
    """The directory to use if TIDEMARK_HOME is not set: `~/.cache/tidemark`.

    If this user has no home directory, or may not write there, it is a directory in the temporary directory, with the
    user's ID in its name. Does not create anything.
    """
    with suppress(RuntimeError):  # neither HOME nor an entry in the list of users
        home = os.environ.get("HOME") or Path("~").expanduser()
        if home and (path := Path(home, ".cache", "tidemark").absolute()) and _is_writable(path):
            return path
    return temporary_home()


def temporary_home() -> Path:
    """A directory in the system's temporary directory. Another user could have created it: see `is_own`."""
    return Path(tempfile.gettempdir(), f"tidemark-{os.getuid()}")


def is_own(path: Path) -> bool:
    """True if this user may trust `path`: an entry in the temporary directory must belong to the user."""
    try:
        return not path.is_relative_to(temporary_home()) or path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True


def _is_writable(path: Path) -> bool:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return False
    try:
        # root has every right in a file system such as /proc, and yet no file can be created there.
        tempfile.TemporaryFile(dir=existing).close()
    except (FileNotFoundError, PermissionError):
        return False
    except OSError:  # for example a full disk, which the program that writes there reports
        return True
    return True


CAUSE_MAX = 400
"""Maximum length of a cause in characters."""

_FRAME = re.compile(
    r"\s*at [\w.$/<>@]+\(.*\)|\s*\.\.\. \d+ (more|common frames)|Traceback \(most recent call last\):"
    r"|\s+File \".*\", line .*|\s+[\^~]+\s*|(NOTE: )?Picked up \w+:.*"
    r"|Error: Could not create the Java Virtual Machine\."
    r"|Error: A fatal exception has occurred\. Program will exit\.|\s*"
)
_STAMP = re.compile(
    r"\[?\d\d(\d\d)?[-/]\d\d[-/]\d\d[T ][\d:.,]+(Z| \w{3,4})?\]? *(\[\d+\] *)?"
    r"(\[?(FATAL|ERROR|WARN|error|critical) *\]?:? +)?"
)
_INITIALIZATION = "Error occurred during initialization of VM"
_SENTENCE = re.compile(
    r"fatal|panic|error|exception|unrecognized|conflicting|cannot|could not|failed|refused|denied|no such|not found",
    re.IGNORECASE,
)


def is_noise(line: str) -> bool:
    """True if a line is blank, a stack frame, or advice that does not name a cause."""
    return _FRAME.fullmatch(line) is not None


def failure_cause(lines: Iterable[str]) -> str:
    """Return the cause as one line of at most `CAUSE_MAX` characters; empty if the program wrote nothing.

    Uses the innermost cause of a Java exception, else the last line that reads like an error, else the last line.
    """
    sentences = [line.strip() for line in lines if not is_noise(line)]
    if not sentences:
        return ""
    causes = [line for line in sentences if line.startswith("Caused by:")]
    problems = [line for line in sentences if _SENTENCE.search(line)]
    chosen = (causes or problems or sentences)[-1]
    if _INITIALIZATION in sentences:  # the sentence after this line names the problem
        chosen = " ".join(sentences[sentences.index(_INITIALIZATION) :][1:2]) or _INITIALIZATION
    text = _STAMP.sub("", chosen, count=1).removeprefix("Caused by:").strip()
    text = re.sub(r'^Exception in thread "[^"]*" ', "", text)
    return text if len(text) <= CAUSE_MAX else f"{text[: CAUSE_MAX - 3]}..."
