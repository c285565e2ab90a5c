"""Fetch the JSON schemas of Kubernetes for kubeconform, from the wheel of `kubernetes-validate`: PyPI is all it needs.

Usage: schemas.py DIRECTORY VERSION... What is there stays.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "kubernetes-validate==1.37.0"
_ENTRY = re.compile(r".*/kubernetes-json-schema/v(?P<version>[\d.]+)-local-strict/(?P<name>[^/]+\.json)")


def fetch(directory: Path, versions: set[str]) -> None:
    """Fill `directory/v<version>-standalone-strict`, as kubeconform names it."""
    missing = {version for version in versions if not folder(directory, version).exists()}
    if not missing:
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        subprocess.run(command, check=True)
        [wheel] = Path(scratch).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.namelist():
                found = _ENTRY.fullmatch(entry)
                if found and found["version"] in missing:
                    place = folder(directory, found["version"])
                    place.mkdir(parents=True, exist_ok=True)
                    (place / found["name"]).write_text(_standalone(archive.read(entry)))


def folder(directory: Path, version: str) -> Path:
    return directory / f"v{version}-standalone-strict"


def _standalone(text: bytes) -> str:
    """The schemas have an absolute `$id`, and refer to neighbours by a path from the root: both are made local."""
    schema = json.loads(text.replace(b'"/api/_definitions.json#', b'"_definitions.json#'))
    schema.pop("$id", None)
    return json.dumps(schema)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]), set(sys.argv[2:]))
