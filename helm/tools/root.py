"""Make the root of an image out of this one: this Python, the programs that are named, and whatever they load.

Usage: root.py TARGET DIRECTORY[,DIRECTORY ...] PROGRAM... A program is named, or any file by its path. The directories
(an environment, a Java) are looked through for shared libraries and not copied: they get layers of their own. What is
left out is what nobody runs there: the package manager, Perl, other programs. Of each Debian package of which something
came along, its entry goes to var/lib/dpkg/status.d, where scanners look for it, and its licence to usr/share/doc.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Of Python's library: tests, desktop, its own documentation, and what installs packages.
UNUSED = {"__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "pydoc_data", "lib2to3", "ensurepip"}
UNUSED |= {"site-packages", "dist-packages", "posix", "right"}  # the last two: time zones once more
# Users, names, certificates, time zones, the one locale, and what finds libraries.
SYSTEM = """
    /etc/passwd /etc/group /etc/nsswitch.conf /etc/host.conf /etc/os-release /etc/debian_version
    /etc/ssl/certs /usr/lib/ssl/certs /usr/lib/ssl/openssl.cnf /usr/share/zoneinfo /usr/lib/locale/C.utf8
    /etc/ld.so.conf /etc/ld.so.conf.d"""
PACKAGES = Path("/var/lib/dpkg")


class Root:
    """Files come to the same paths below `target`, links with what they point to."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.files: set[Path] = set()
        for place in ("dev", "proc", "sys", "run", "tmp", "var/tmp", "var/lib/dpkg/status.d"):
            (target / place).mkdir(parents=True)
        target.chmod(0o755)
        for place in ("tmp", "var/tmp"):
            (target / place).chmod(0o1777)
        for link in ("bin", "lib", "lib64", "sbin"):
            if Path("/", link).is_symlink():
                (target / "usr" / link).mkdir(parents=True)
                (target / link).symlink_to(f"usr/{link}")

    def copy_of(self, path: Path) -> Path:
        return self.target / path.relative_to("/")

    def add(self, path: Path) -> None:
        """Nothing where nothing is; a directory without what is `UNUSED`."""
        for parent in path.parents:
            if parent.is_symlink() and not self.copy_of(parent).is_symlink():
                self.copy_of(parent).parent.mkdir(parents=True, exist_ok=True)
                self.copy_of(parent).symlink_to(parent.readlink())
        path = path.parent.resolve() / path.name
        if path in self.files or not os.path.lexists(path):
            return
        copy = self.copy_of(path)
        if path.is_symlink():
            self.files.add(path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path.readlink())
            self.add(path.parent / path.readlink())
        elif path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
            for entry in sorted(path.iterdir()):
                if entry.name not in UNUSED and not entry.name.startswith("config-3"):  # what links against Python
                    self.add(entry)
        else:
            self.files.add(path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)

    def add_libraries(self, found_in: set[Path]) -> None:
        """All that the ELF files ask for, as the loader of this system answers."""
        for path in sorted(found_in):
            with path.open("rb") as file:
                if file.read(4) != b"\x7fELF":
                    continue
            done = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)
            # Java's own libraries lean on one that their program has loaded before them.
            if set(re.findall(r"(\S+) => not found", done.stdout)) - {file.name for file in found_in}:
                sys.exit(f"root.py: {path} needs what is not here:\n{done.stdout}")
            for library in re.findall(r"(/\S+) \(0x", done.stdout):
                if not library.startswith(OURS):
                    self.add(Path(library))

    def add_packages(self) -> None:
        """The entries and the licences of the Debian packages of which something is here."""
        here = {re.sub("^/usr", "", str(path)) for path in self.files}
        entries = {}
        for entry in (PACKAGES / "status").read_text().split("\n\n"):
            if named := re.match(r"\s*Package: (\S+)", entry):
                entries[named[1]] = entry
        for listed in (PACKAGES / "info").glob("*.list"):
            package = listed.stem.partition(":")[0]
            if here & {re.sub("^/usr", "", line) for line in listed.read_text().splitlines()}:
                (self.copy_of(PACKAGES) / "status.d" / package).write_text(entries[package] + "\n")
                self.add(Path("/usr/share/doc", package, "copyright"))


target, directories, *programs = sys.argv[1:]
OURS = tuple(directories.split(","))
root = Root(Path(target).absolute())
for name in SYSTEM.split():
    root.add(Path(name))
root.add(Path(sys.executable))
root.add(Path(sysconfig.get_path("stdlib")))
for name in programs:
    root.add(Path(name if "/" in name else shutil.which(name) or sys.exit(f"root.py: there is no {name}")))
below = {path for directory in OURS for path in Path(directory).rglob("*")}
for link in {path for path in below if path.is_symlink()}:
    if not str(where := link.parent / link.readlink()).startswith(OURS):
        root.add(where)
root.add_libraries({path for path in below | root.files if path.is_file() and not path.is_symlink()})
root.add_packages()
subprocess.run(["ldconfig", "-r", target], check=True)
# A root that cannot be written to keeps no compiled modules: they come with it.
library = target + sysconfig.get_path("stdlib")
subprocess.run([sys.executable, "-m", "compileall", "-q", "-s", target, library], check=True)
