"""Finds the line that says why a program ended in the output of the program. Pure."""

import re
from collections.abc import Iterable

CAUSE_MAX = 400
"""Maximum length of a cause in characters."""

_FRAME = re.compile(
    r"\s*at [\w.$/<>@]+\(.*\)|\s*\.\.\. \d+ (more|common frames)|Traceback \(most recent call last\):"
    r"|\s+File \".*\", line .*|\s+[\^~]+\s*|(NOTE: )?Picked up \w+:.*"
    r"|Error: Could not create the Java Virtual Machine\."
    r"|Error: A fatal exception has occurred\. Program will exit\.|\s*"
)
_STAMP = re.compile(
    r"\[?\d\d(\d\d)?[-/]\d\d[-/]\d\d[T ][\d:.,]+(Z| \w{3,4})?\]? *(\[\d+\] *)?"
    r"(\[?(FATAL|ERROR|WARN|error|critical) *\]?:? +)?"
)
_INITIALIZATION = "Error occurred during initialization of VM"
_SENTENCE = re.compile(
    r"fatal|panic|error|exception|unrecognized|conflicting|cannot|could not|failed|refused|denied|no such|not found",
    re.IGNORECASE,
)


def is_noise(line: str) -> bool:
    """True if a line is blank, a stack frame, or advice that does not name a cause."""
    return _FRAME.fullmatch(line) is not None


def failure_cause(lines: Iterable[str]) -> str:
    """Return the cause as one line of at most `CAUSE_MAX` characters; empty if the program wrote nothing.

    Uses the innermost cause of a Java exception, else the last line that reads like an error, else the last line.
    """
    sentences = [line.strip() for line in lines if not is_noise(line)]
    if not sentences:
        return ""
    causes = [line for line in sentences if line.startswith("Caused by:")]
    problems = [line for line in sentences if _SENTENCE.search(line)]
    chosen = (causes or problems or sentences)[-1]
    if _INITIALIZATION in sentences:  # the sentence after this line names the problem
        chosen = " ".join(sentences[sentences.index(_INITIALIZATION) :][1:2]) or _INITIALIZATION
    text = _STAMP.sub("", chosen, count=1).removeprefix("Caused by:").strip()
    text = re.sub(r'^Exception in thread "[^"]*" ', "", text)
    return text if len(text) <= CAUSE_MAX else f"{text[: CAUSE_MAX - 3]}..."
