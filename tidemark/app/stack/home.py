"""The directory of the local stack, the lock against a second stack in this directory, and how to run programs that
need a name for their user."""

import fcntl
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidemark.common.environment import server_environment
from tidemark.common.errors import Stop


class AlreadyRunning(Stop):
    """Another `tidemark up` uses this directory. `pid` is the process ID of the other `tidemark up`."""

    def __init__(self, root: Path, pid: str) -> None:
        super().__init__(
            f"a stack is already running in {root} (pid {pid}): stop it with Ctrl-C or `kill {pid}`,"
            " or set another TIDEMARK_HOME and other ports for the new stack"
        )
        self.root = root
        self.pid = pid


@dataclass(frozen=True, slots=True)
class Home:
    """The layout of TIDEMARK_HOME. Directories are created at their first use."""

    root: Path

    def _directory(self, *parts: str) -> Path:
        path = self.root.joinpath(*parts)
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def jars(self) -> Path:
        """The directory of downloaded jars."""
        return self._directory("jars")

    def data(self, name: str) -> Path:
        """The data directory of the process `name`."""
        return self._directory("data", name)

    def log(self, name: str) -> Path:
        """The path of the log file of the process `name`."""
        return self._directory("log") / f"{name}.log"

    def pid_file(self, name: str) -> Path:
        """The path of the pid file of the process `name`."""
        return self._directory("run") / f"{name}.pid"

    @property
    def stack_env(self) -> Path:
        return self.root / "stack.env"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory while the block runs. Raises `AlreadyRunning` if another process has the lock.

        The operating system also releases the lock if the process is killed. The process ID in the file is only for the
        error message.
        """
        path = self.pid_file("up")
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise AlreadyRunning(self.root, file.read().strip()) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
            file.truncate(0)


_NSS_WRAPPER_PATTERNS = ("usr/lib/libnss_wrapper.so", "usr/lib64/libnss_wrapper.so", "usr/lib/*/libnss_wrapper.so")


class NeedsNamedUser(Stop):
    def __init__(self, uid: int) -> None:
        super().__init__(
            f"Postgres and Spark refuse to run as user {uid}, because this user has no name: add a line for the user"
            " to /etc/passwd, or install libnss_wrapper (Debian, Ubuntu: `apt-get install libnss-wrapper`)"
        )


@dataclass(frozen=True, slots=True)
class NamedUser:
    """How to run a program so that the program finds a name for its user. Both fields are empty if the user has a name.

    Attributes:
        command_prefix: the words to put before the command.
        variables: environment variables to add: name -> value.
    """

    command_prefix: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def find_named_user(directory: Path) -> NamedUser:
    """Find out how to run a program that needs a name for this process's user.

    If the user has a name, the program runs as usual. If not, the program runs in a user namespace. If this machine
    allows no user namespaces, the program runs with the library nss_wrapper.

    Args:
        directory: the directory to which the files of nss_wrapper are written, if they are needed. The files must exist
            as long as the program runs.

    Raises:
        NeedsNamedUser: the user has no name, and this machine has neither user namespaces nor nss_wrapper.
    """
    uid, gid = os.geteuid(), os.getegid()
    with suppress(KeyError):
        pwd.getpwuid(uid)
        return NamedUser()
    unshare = ["unshare", "--user", f"--map-user={pwd.getpwnam('nobody').pw_uid}"]
    if _succeeds([*unshare, "true"]):
        return NamedUser(unshare)
    library = next((path for pattern in _NSS_WRAPPER_PATTERNS for path in Path("/").glob(pattern)), None)
    if library is None:
        raise NeedsNamedUser(uid)
    passwd, group = directory / "passwd", directory / "group"
    passwd.write_text(f"tidemark:x:{uid}:{gid}::{directory}:/bin/sh\n")
    group.write_text(f"tidemark:x:{gid}:\n")
    files = {"NSS_WRAPPER_PASSWD": str(passwd), "NSS_WRAPPER_GROUP": str(group)}
    return NamedUser(variables={"LD_PRELOAD": str(library), **files})


def _succeeds(command: Sequence[str]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, env=server_environment(), capture_output=True, check=False).returncode == 0
