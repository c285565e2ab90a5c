"""The pages of the incidents without their servers, and the shortened rules."""

import re

import pytest
import yaml

from tests.helm.tools import alert_rules
from tests.incidents.hasty import FASTER, hastened
from tests.incidents.pages import FOLDER, Entry, differs, made_anew, shown, told
from tidemark.app.verbs import dead_letters, late, override_log, status

INDEX = (FOLDER / "README.md").read_text()
INCIDENTS = {line.split("(")[1].split(")")[0]: line for line in INDEX.splitlines() if line.startswith("| [")}
PAGE = """# An incident

```console
$ tidemark gaps
orders: w (epoch 7) owes 3
alert: TidemarkGapOld, warning
held for 17 s
```

It ends.

```console
$ tidemark wait orders 12
```
"""


def test_the_index_has_twelve_incidents_with_the_alerts_of_their_pages() -> None:
    """Each page wakes by the alerts that its line names, as the chart has them, and shows what was typed."""
    rules = [rule for group in yaml.safe_load(alert_rules())["groups"] for rule in group["rules"]]
    known = {f"alert: {rule['alert']}, {rule['labels']['severity']}" for rule in rules}
    assert len(INCIDENTS) == 12
    for name, line in INCIDENTS.items():
        prompts = told((FOLDER / name).read_text())
        woken = {prompt for prompt in prompts if prompt.startswith("alert: ")}
        assert woken <= known
        named = set(re.findall(r"Tidemark\w+", line)) | {"TidemarkManualOverride"}
        assert {prompt.split()[1].rstrip(",") for prompt in woken} <= named, name
        assert [prompt for prompt in prompts if prompt.startswith("$ tidemark ")]


def test_a_page_gets_what_was_printed_below_what_was_typed() -> None:
    """Prose stays. Numbers in a command may be others than on the page, words may not."""
    entries = [
        Entry("$ tidemark gaps", "no gaps: nothing is blocked\n"),
        Entry("alert: TidemarkGapOld, warning", "held for 9 s"),
        Entry("$ tidemark wait orders 13", "orders is at m13\n"),
    ]
    page = made_anew(PAGE, entries)
    assert page.splitlines()[3:7] == ["$ tidemark gaps", "no gaps: nothing is blocked", *str(entries[1]).splitlines()]
    assert page.endswith("```console\n$ tidemark wait orders 13\norders is at m13\n```\n")
    assert "\nIt ends.\n" in page
    assert differs(PAGE, entries) == ""
    assert "the test typed" in differs(PAGE, entries[:2])
    assert "the test typed" in differs(PAGE, [*entries[:2], Entry("$ tidemark wait returns 12", "")])


@pytest.mark.parametrize("name", INCIDENTS)
def test_a_page_shows_the_texts_of_today(name: str) -> None:
    """Alerts have the texts of the chart but for labels and values, and tables the headings of the command line."""
    rules = {rule["alert"]: rule for group in yaml.safe_load(alert_rules())["groups"] for rule in group["rules"]}
    headings = {verb.HEADINGS for verb in (dead_letters, late, override_log, status)}
    for prompt, printed in shown((FOLDER / name).read_text()):
        if alert := re.fullmatch(r"alert: (\w+), \w+", prompt):
            texts = rules[alert[1]]["annotations"]
            expected = f"{texts['summary']}\nfirst: {texts['command']}\n{texts['action']}\n"
            pattern = ".+?".join(map(re.escape, re.split(r"\{\{.*?\}\}", expected)))
            assert re.fullmatch(pattern, printed), f"{printed}\n{expected}"
        for line in printed.splitlines():
            if re.fullmatch(r"[A-Z ]+", line):
                assert tuple(re.split(r"  +", line.strip())) in headings, line


def test_all_times_of_the_rules_are_shortened_alike() -> None:
    """Of `for:`, of ranges and offsets, and of seconds that are compared; counts stay."""
    before, after = (
        {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}
        for text in (alert_rules(), hastened(alert_rules()))
    )
    assert (before["TidemarkNoBatches"]["for"], after["TidemarkNoBatches"]["for"]) == (
        "2m",
        f"{120_000 // FASTER}ms",
    )
    assert "> 300)" in before["TidemarkNoBatches"]["expr"]
    assert f"> {300 // FASTER})" in after["TidemarkNoBatches"]["expr"]
    assert f"[{600_000 // FASTER}ms]" in after["TidemarkDeadLetters"]["expr"]
    assert after["TidemarkKafkaLag"]["expr"] == before["TidemarkKafkaLag"]["expr"]
    left = [
        rule["alert"] for rule in after.values() if re.search(r"\d[smh]\b(?<!ms)", rule["expr"] + rule.get("for", ""))
    ]
    assert left == []
