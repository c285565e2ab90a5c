from pathlib import Path

from tidemark.app.metrics_page import page


def test_metrics_page_is_up_to_date() -> None:
    """docs/metrics.md says what the metrics say of themselves; `make docs` writes it."""
    assert Path("docs/metrics.md").read_text() == page()
