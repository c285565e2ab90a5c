"""A name for a user who has none: platforms such as OpenShift draw a random user ID for each container.

Postgres's initdb and Spark's Hadoop ask the system for the name of their user, and end if there is none.
"""

import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidemark.common.environment import server_environment
from tidemark.common.errors import Stop

_LIBRARIES = ("usr/lib/libnss_wrapper.so", "usr/lib64/libnss_wrapper.so", "usr/lib/*/libnss_wrapper.so")


class NeedsNamedUser(Stop):
    def __init__(self, uid: int) -> None:
        super().__init__(
            f"Postgres and Spark refuse to run as user {uid}, who has no name on this machine: add a line for that user"
            " to /etc/passwd, or install libnss_wrapper (Debian, Ubuntu: `apt-get install libnss-wrapper`)"
        )


@dataclass(frozen=True, slots=True)
class NamedUser:
    """What gives the user of a program a name: the beginning of its command line, and variables."""

    command: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def named_user(directory: Path) -> NamedUser:
    """What a program needs so that this user has a name: nothing, a user namespace, or a library (nss_wrapper).

    Args:
        directory: for files that must be there as long as the program runs.

    Raises:
        NeedsNamedUser: there is no way to give a name.
    """
    uid, gid = os.geteuid(), os.getegid()
    with suppress(KeyError):
        pwd.getpwuid(uid)
        return NamedUser()
    unshare = ["unshare", "--user", f"--map-user={pwd.getpwnam('nobody').pw_uid}"]
    if _succeeds([*unshare, "true"]):
        return NamedUser(unshare)
    library = next((path for place in _LIBRARIES for path in Path("/").glob(place)), None)
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
