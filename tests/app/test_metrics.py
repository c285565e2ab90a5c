from pathlib import Path

from app import metrics


def test_metrics_page_is_up_to_date() -> None:
    """docs/metrics.md says what app/metrics.py says; `make docs` writes it."""
    assert Path("docs/metrics.md").read_text() == metrics.page()
