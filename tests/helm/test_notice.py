"""The software of others that the images carry is named."""

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def notice() -> Any:
    """helm/tools is no package of ours: only `make` runs it."""
    spec = importlib.util.spec_from_file_location("notice", ROOT / "helm/tools/notice.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notice_names_what_the_images_carry() -> None:
    """Each Python package of each role with its license; `python helm/tools/notice.py` writes it."""
    written = (ROOT / "NOTICE").read_text()
    for name in notice().packages():
        assert f"\n{name}: " in written, name
    for name in ("OpenJDK", "Python", "tini", "Apache Spark", "coreutils", "Debian"):
        assert name in written
    assert (ROOT / "Dockerfile").read_text().count("COPY LICENSE NOTICE") == 2
