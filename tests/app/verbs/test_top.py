"""`tidemark top` on real servers."""

import json

from click.testing import CliRunner

from tests.app.sidecar.given import At, moved
from tests.sinks.reader.given import Pipeline
from tidemark.app.cli import main


def test_each_look_shows_what_is_held_before_what_stands(pipeline: Pipeline, dsn: str) -> None:
    """As `gaps` and `status` tell it; for programs a line each."""
    pipeline.publish(moved("s", 7, w=At(0, 7, pending=9)))
    settings = {"TIDEMARK_POSTGRES_DSN": dsn}
    shown = CliRunner().invoke(main, ["top", "--times=1"], env=settings)
    assert shown.exit_code == 0
    assert shown.output.index("s: w (epoch 1) owes 8") < shown.output.index("STREAM")
    told = CliRunner().invoke(main, ["top", "--times=2", "--every=0.2", "--json"], env=settings)
    looks = [json.loads(line) for line in told.output.splitlines()]
    assert [(it["streams"][0]["linear"], it["gaps"][0]["top"]) for it in looks] == [(7, 8), (7, 8)]
