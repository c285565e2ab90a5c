"""The blocks of pages that no test of this folder types on a local stack, and why."""

import re
from collections.abc import Mapping

from tests.docs.shell import Block

SERVICES = "tests/services/test_page.py compares the program with the one that runs there"
EXAMPLES = "tests/sinks/reader/test_docs.py runs the program"
UNTYPED: Mapping[str, str] = {
    r"CONTRIBUTING\.md console": "installs packages, runs all tests, and changes the hooks of the checkout",
    r"helm/tidemark/README\.md sh": "needs a cluster; `make kube-test` runs helm on one (tests/helm/installs.py)",
    r"docs/design\.md text": "a drawing",
    r"docs/how-to/deploy\.md  pipeline ": "rights in Redis; tests/app/test_redis_rights.py gives them to its users",
    r"docs/how-to/kubernetes\.md sh": "needs a cluster; tests/helm/installs.py runs the commands",
    r"docs/how-to/kubernetes\.md yaml": "values and templates of a chart; tests/helm/check_chart.py renders both",
    r"docs/how-to/read-facts\.md python from prometheus_client": EXAMPLES,
    r"docs/how-to/read-facts\.md python for batch in reader": EXAMPLES,
    r"docs/how-to/read-facts\.md python with Reader\(": "tests/sinks/reader/test_own_effects.py has such a reader",
    r"docs/how-to/read-from-redis\.md json": "a message of a channel; tests/app/test_follow_positions.py reads it",
    r"docs/how-to/read-in-any-language\.md (?:go|java|js|python) ": SERVICES,
    r"docs/how-to/read-positions\.md python": EXAMPLES,
    r"docs/how-to/release\.md console": "needs the rights and the key of a release; tests/helm/check_package.py"
    " signs a chart",
    r"docs/how-to/runbooks/synapse\.md": "needs a homeserver; tests/sources/synapse/test_history.py starts one",
    r"docs/how-to/synapse\.md": "needs a homeserver; tests/sources/synapse/test_history.py starts one",
    r"docs/how-to/write-facts\.md (?:go|java|js) ": SERVICES,
    r"docs/how-to/write-facts\.md python (?:from sqlalchemy|import) ": SERVICES,
    r"docs/reference/cli\.md text": "test_how_to.py parses the examples of the help",
    r"docs/reference/sql-functions\.md sql tidemark": "signatures; test_reference.py compares them with the functions",
    r"docs/tutorials/blocked-stream\.md sql SELECT pg_terminate_backend": "the second of two ways; the first is typed",
    r"docs/tutorials/kubernetes\.md console": "needs a cluster; tests/helm/tutorial.py runs the commands",
}
"""By patterns of page, language and first line."""


def untyped(page: str, block: Block) -> str | None:
    """Why no test types the block; None if one does."""
    place = f"{page} {block.language} {block.text}"
    return next((reason for pattern, reason in UNTYPED.items() if re.match(pattern, place)), None)
