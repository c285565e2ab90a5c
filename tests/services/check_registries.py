"""Services in Go, Java and Node. Their libraries come from where each language has them: `make languages-test`."""

from pathlib import Path

from tests.services.programs import places_orders
from tests.services.shop import Shop


def test_what_a_program_in_go_commits_is_told(shop: Shop, go: Path) -> None:
    """By pgx."""
    places_orders(shop, [go / "orders"])


def test_what_a_program_in_java_commits_is_told(shop: Shop, java: str, javac: str) -> None:
    """By JDBC."""
    places_orders(shop, [java, "-cp", javac, "Orders"])


def test_what_a_program_in_node_commits_is_told(shop: Shop, npm: Path) -> None:
    """By pg."""
    places_orders(shop, ["node", npm / "orders.mjs"])
