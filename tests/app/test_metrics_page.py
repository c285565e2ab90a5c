from pathlib import Path

from tidemark.app.metrics_page import page


def test_metrics_page_is_up_to_date() -> None:
    """docs/reference/metrics.md says what the metrics say of themselves; `make docs` writes it."""
    assert Path("docs/reference/metrics.md").read_text() == page()
