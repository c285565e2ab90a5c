from tests.bench import flat


def test_a_short_run_ends_at_the_right_positions() -> None:
    """The synthetic run checks its own positions and shows a row for each tenth of the records."""
    figures = flat.run(flat.FlatPlan(records=4_000, batch=200))
    assert figures["records"] == 4_000 + 8
    assert len(figures["rows"]) == 10
    assert all("|" in line for line in flat.render(figures)[2:13])
