"""Adds jars to a list of Python packages: CycloneDX components, and rows of licences. Called by `helm/tools/sbom`.

Usage: jars.py SBOM LICENCES OUT JARS... Jars tell in META-INF what they are; one that does not is listed by its name.
"""

import hashlib
import json
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMED = re.compile(r"(?P<name>.+?)-(?P<version>\d[\w.+-]*)\.jar")


@dataclass(frozen=True, slots=True)
class Jar:
    group: str
    name: str
    version: str
    licence: str
    sha256: str

    def component(self) -> dict[str, Any]:
        purl = (
            f"pkg:maven/{self.group}/{self.name}@{self.version}"
            if self.group
            else f"pkg:generic/{self.name}@{self.version}"
        )
        found: dict[str, Any] = {
            "type": "library",
            "bom-ref": f"{purl}#{self.sha256[:12]}",
            "name": self.name,
            "version": self.version,
            "purl": purl,
            "hashes": [{"alg": "SHA-256", "content": self.sha256}],
        }
        if self.group:
            found["group"] = self.group
        if self.licence:
            found["licenses"] = [{"license": {"name": self.licence}}]
        return found

    def row(self) -> str:
        return f"| {self.name} | {self.version} | {self.licence or 'see the licences of pyspark'} | {self.group} |"


def read(path: Path) -> Jar:
    named = _NAMED.fullmatch(path.name)
    name, version = (named["name"], named["version"]) if named else (path.stem, "unknown")
    group = licence = ""
    with zipfile.ZipFile(path) as jar:
        for entry in jar.namelist():
            if entry.endswith(f"/{name}/pom.properties"):
                group = _properties(jar.read(entry).decode(errors="replace")).get("groupId", "")
        if "META-INF/MANIFEST.MF" in jar.namelist():
            # A long line goes on in the next one, after a space.
            manifest = (
                jar.read("META-INF/MANIFEST.MF").decode(errors="replace").replace("\r\n", "\n").replace("\n ", "")
            )
            licence = _properties(manifest, ":").get("Bundle-License", "")
    return Jar(group, name, version, licence, hashlib.sha256(path.read_bytes()).hexdigest())


def _properties(text: str, sign: str = "=") -> dict[str, str]:
    pairs = (line.partition(sign) for line in text.splitlines() if sign in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def main(sbom: Path, licences: Path, out: Path, *folders: Path) -> None:
    jars = [read(path) for folder in folders for path in sorted(folder.glob("*.jar"))]
    document = json.loads(sbom.read_text())
    document["components"] += [jar.component() for jar in jars]
    (out / "sbom.cdx.json").write_text(json.dumps(document, indent=2) + "\n")
    lines = ["# Licences", "", "## Python packages", "", licences.read_text().strip(), ""]
    lines += ["## Jars", "", "| jar | version | licence | group |", "|---|---|---|---|", *(jar.row() for jar in jars)]
    (out / "licences.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
