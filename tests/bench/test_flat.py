from tests.bench import flat


def test_a_short_run_ends_at_the_right_positions() -> None:
    """The synthetic run checks its own positions and shows a row for each tenth of the records."""
    figures = flat.run(flat.FlatPlan(records=20_000, batch=1_000))
    assert figures["records"] == 20_000 + 8
    assert len(figures["rows"]) == 10
    assert all("|" in line for line in flat.render(figures)[2:13])
