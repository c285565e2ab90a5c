"""Settings of Spark's own, from a file."""

from pathlib import Path

import pytest

from tidemark.app.engine import properties
from tidemark.streaming.errors import BadSetting


def test_properties_are_read_as_spark_reads_them(tmp_path: Path) -> None:
    """With a space, `=` or `:` between name and value, remarks left out."""
    path = tmp_path / "spark.conf"
    path.write_text("# remark\n\nspark.a  1 2\nspark.b=x=y\n  spark.c : z\nspark.d\t8\n")
    assert properties(path) == {"spark.a": "1 2", "spark.b": "x=y", "spark.c": "z", "spark.d": "8"}


@pytest.mark.parametrize("text", ["sparkle 1\n", "spark.alone\n"])
def test_a_line_that_is_no_setting_is_named(tmp_path: Path, text: str) -> None:
    """A typing error must not be passed over in silence."""
    (tmp_path / "spark.conf").write_text(text)
    with pytest.raises(BadSetting, match=text.strip()):
        properties(tmp_path / "spark.conf")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With its path."""
    with pytest.raises(BadSetting, match=r"TIDEMARK_SPARK_CONF_FILE: cannot read .*nowhere"):
        properties(tmp_path / "nowhere")
