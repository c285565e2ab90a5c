"""What people have in the environment of `tidemark up`: the matrix that `make environments-test` goes through.

`tests.app.test_environments` starts the stack in many of them at once.
"""

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEAD = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Case:
    """One kind of shell. `unset` variables are missing; `home` is the name of the home below a test's directory.

    `user_home` is the name of $HOME below that directory, if TIDEMARK_HOME is not set. A `nameless` user is in no list
    of users. The `ordinary` user is `nobody`, who is in the list and has no home.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()
    home: str = "home"
    umask: int = 0o022
    linked: bool = False
    noexec: bool = False
    nameless: bool = False
    ordinary: bool = False
    user_home: str = ""

    @property
    def uid(self) -> int | None:
        """The user of the shell, if it is another one than that of the test."""
        return UID if self.nameless else pwd.getpwnam("nobody").pw_uid if self.ordinary else None


def variables(directory: Path) -> dict[str, str]:
    """Every variable of the matrix; each is one that somebody has. `directory` is for the settings of another Spark."""
    return {
        "CLASSPATH": "/none/*",
        "HADOOP_CONF_DIR": "/none",
        "JAVA_TOOL_OPTIONS": "-XX:+UseG1GC",
        "JDK_JAVA_OPTIONS": "-XX:+UseParallelGC",
        "KAFKA_OPTS": "-XX:+UseG1GC",
        "PGCLIENTENCODING": "SQL_ASCII",
        "PGDATABASE": "production",
        "PGDATESTYLE": "SQL, DMY",
        "PGHOST": "192.0.2.1",
        "PGHOSTADDR": "192.0.2.1",
        "PGOPTIONS": "-c default_transaction_read_only=on",
        "PGPASSWORD": "wrong",
        "PGSERVICE": "production",
        "PGSSLMODE": "require",
        "PGTARGETSESSIONATTRS": "standby",
        "PYSPARK_DRIVER_PYTHON": "jupyter",
        "PYSPARK_PYTHON": "/none/python",
        "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
        "SPARK_CONF_DIR": str(directory),
        "SPARK_HOME": "/opt/none",
        "_JAVA_OPTIONS": "-Xmx8m",
        "all_proxy": DEAD,
        "http_proxy": DEAD,
        "https_proxy": DEAD,
    }


def cases(directory: Path) -> dict[str, Case]:
    """The matrix, by name: each variable alone, then what homes and users there are."""
    alone = {name: Case({name: text}) for name, text in variables(directory).items()}
    return alone | {
        "HTTP_PROXY": Case({"HTTP_PROXY": DEAD, "http_proxy": DEAD, "NO_PROXY": "intra"}),
        "a space": Case(home="my home"),
        "an accent": Case(home="José", variables={"LC_ALL": "C"}),
        "beyond Latin-1": Case(home="домой, 家"),
        "a quote": Case(home="it's $HOME"),
        "a symbolic link": Case(linked=True),
        "no home": Case(unset=["HOME"]),
        "no home for an ordinary user": Case(ordinary=True, unset=["HOME"]),
        "an accent in $HOME": Case(user_home="José", variables={"LC_ALL": "C"}),
        "beyond Latin-1 in $HOME": Case(user_home="домой, 家"),
        "a home that cannot be written": Case({"HOME": "/proc"}),
        "umask 077": Case(umask=0o077),
        "no locale": Case({"LC_ALL": "C"}, unset=["LANG"]),
        "no exec": Case(noexec=True),
        "a random user": Case(nameless=True, unset=["HOME"]),
    }


UID = 54321
_PRIVATE = r"""
set -e
if [ -n "$NOEXEC" ]; then
    mount -t tmpfs -o noexec,mode=755 none "$NOEXEC"
    ln -s "$JARS" "$NOEXEC/jars"
    chown "${OTHER_USER:-0}" "$NOEXEC"
fi
if [ -n "$OTHER_USER" ]; then
    kept=$(mktemp -d); mount -t tmpfs none "$kept"; number=0
    for passed in $PASSED; do
        number=$((number + 1)); mkdir "$kept/$number"; mount --bind "$passed" "$kept/$number"
    done
    mount -t tmpfs -o mode=755 none /root; number=0
    for passed in $PASSED; do
        number=$((number + 1)); mkdir -p "$passed"; mount --bind "$kept/$number" "$passed"
    done
    set -- setpriv --reuid=$OTHER_USER --regid=$OTHER_USER --clear-groups "$@"
fi
unset NOEXEC OTHER_USER PASSED JARS
exec "$@"
"""


def can_mount() -> bool:
    """Whether this machine lets us have mounts of our own."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return False
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def private(case: Case, home: Path, jars: Path) -> tuple[list[str], dict[str, str]]:
    """The beginning of a command with mounts of its own, as `case` wants them, and variables that it needs.

    Args:
        home: the home, which nobody else sees if nothing in it may be executed.
        jars: the directory of the jars.
    """
    told = {
        "NOEXEC": str(home) if case.noexec else "",
        "OTHER_USER": str(case.uid or ""),
        "JARS": str(jars),
    }
    # Others than root may not pass the home of root, in which Python may be.
    told["PASSED"] = " ".join(str(it) for it in (Path(sys.base_prefix), jars) if it.is_relative_to("/root"))
    return ["unshare", "-m", "sh", "-c", _PRIVATE, "sh"], told
