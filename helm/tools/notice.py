"""NOTICE: the software of others that the images carry, with its licenses.

`python helm/tools/notice.py` writes it, from what is installed of each role's dependencies."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROLES = ("relay", "reader", "pipeline", "sidecar", "otel")
BEGIN = """\
Tidemark

This product is licensed under the Apache License, Version 2.0 (LICENSE).

Its container images carry software of others under licenses of their own. The texts of these lie
beside the software: in the folders *.dist-info below /opt/tidemark/lib of each Python package, in
/opt/java/legal of Java, and in the packages of Debian. `make sbom` lists every file's package and
version.

Python (PSF-2.0), tini (MIT), and in the larger image OpenJDK (GPL-2.0 with the Classpath
Exception), bash (GPL-3.0-or-later), coreutils (GPL-3.0-or-later) and nss_wrapper (BSD-3-Clause).
What they load of Debian, such as the GNU C library (LGPL-2.1-or-later) and OpenSSL (Apache-2.0), is
as Debian distributes it. pyspark brings the jars of Apache Spark and of what Spark needs, whose
notices are in its own folder.

Python packages:

"""


_NOT_LISTED = {"tidemark-streams", "async-timeout"}
"""Ourselves, and what redis-py needs only before Python 3.11.3. The images have a newer one."""


def packages() -> list[str]:
    """Names of what the roles need, and of what that needs, where it is installed."""
    found: dict[str, None] = {}
    waiting = [it for it in distribution("tidemark-streams").requires or [] if _is_of(it, ROLES)]
    while waiting:
        name, extras = re.match(r"([A-Za-z0-9._-]+)(?:\[([a-z,]+)\])?", waiting.pop()).groups()  # type: ignore[union-attr]
        name = name.lower().replace("_", "-")
        if name in found or name in _NOT_LISTED:
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # of another platform or Python
            continue
        found[name] = None
        waiting += [it for it in needs if _is_of(it, tuple((extras or "").split(",")))]
    return sorted(found)


def page() -> str:
    return BEGIN + "".join(f"{name}: {_license(name)}\n" for name in packages())


def _is_of(requirement: str, roles: tuple[str, ...]) -> bool:
    extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", requirement)
    return extra is None or extra[1] in roles


def _license(name: str) -> str:
    about: Any = distribution(name).metadata
    if expression := about.get("License-Expression"):
        return str(expression)
    classified = [it.rpartition(" :: ")[2] for it in about.get_all("Classifier") or [] if it.startswith("License ::")]
    named = (about.get("License") or "").strip().splitlines()
    return ", ".join(classified) or (named[0] if named else "as its folder says")


if __name__ == "__main__":
    (ROOT / "NOTICE").write_text(page(), "utf-8")
