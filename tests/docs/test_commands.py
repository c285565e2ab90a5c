"""README and tutorials, typed word for word on a local stack: each command succeeds and prints what the page shows."""

import re
import shlex

import pytest

from tests.docs.shell import NOT_TYPED, VISIBLE_SECONDS, Shell, blocks, commands, typed_page
from tests.waiting import eventually

pytestmark = pytest.mark.slow


def test_the_first_tutorials(shell: Shell) -> None:
    """A first stream and reader, then a blocked stream, as one who begins types them."""
    typed_page(shell, "docs/tutorials/first-stream.md")
    typed_page(shell, "docs/tutorials/blocked-stream.md")


def test_the_readme(shell: Shell) -> None:
    """The first stream, the first reader."""
    typed_page(shell, "README.md")
    (program,) = (block.text for block in blocks("README.md") if block.language == "python")
    assert len(program.splitlines()) <= 10
    (shell.folder / "books.py").write_text(program)
    shell.follow(".venv/bin/python books.py", ["{'id': 1, 'total': 40}"])


def test_the_tutorial_of_django(shell: Shell) -> None:
    """The project is made as the page says, sells two tickets and rolls one back; the reader counts 42."""
    places = {"models": "tickets/models.py", "0002_stream": "tickets/migrations/0002_stream.py"}
    commands_folder = "tickets/management/commands"
    for block in blocks("docs/tutorials/django.md"):
        if block.language == "python" and "settings.py" in block.before:
            settings = shell.folder / "shop/settings.py"
            before, _, databases = settings.read_text().partition("DATABASES = ")
            after = databases.partition("\n}\n")[2]
            text = f"import os\n{before}{block.text}{after}"
            settings.write_text(
                text.replace("'django.contrib.staticfiles',", "'django.contrib.staticfiles', 'tickets',")
            )
        elif block.language == "python":
            name = next((path for part, path in places.items() if part in block.before), None)
            target = shell.folder / (name or f"{commands_folder}/keep_revenue.py")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
        elif block.language == "console" and ">>>" in block.text:
            said = re.findall(r"^(?:>>>|\.\.\.) ?(.*)$", block.text, re.MULTILINE)
            imports = "from tickets.models import sell"
            statements = "\n".join([imports, *said])
            shell.typed(f"../.venv/bin/python manage.py shell -c {shlex.quote(statements)}")
        elif block.language == "console":
            for command, _ in commands(block.text):
                if not NOT_TYPED.match(command) and "keep_revenue" not in command:
                    shell.typed(command)

    def revenue_is_stored() -> None:
        eventually(lambda: shell.typed('psql -Atc "SELECT total FROM revenue"') == "42\n", VISIBLE_SECONDS)

    def are_published() -> bool:
        return re.search(r"^tickets +[2-9]", shell.typed("../.venv/bin/tidemark status"), re.MULTILINE) is not None

    eventually(are_published, VISIBLE_SECONDS)  # otherwise the reader may print a line for each ticket
    shell.follow("../.venv/bin/python manage.py keep_revenue", ["tickets: 2, revenue: 42"], revenue_is_stored)
