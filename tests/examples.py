"""How many examples a property is tried with: all in `make test`, a quarter in `make test-unit`.

No example has a deadline: on a busy machine that would say nothing of the code.
"""

from hypothesis import settings

QUICK = "quick"
"""The profile of `make test-unit`: `pytest --hypothesis-profile quick`."""

settings.register_profile("whole", deadline=None)
settings.register_profile(QUICK, max_examples=25, deadline=None)
if settings.get_current_profile_name() == "default":  # Hypothesis has one of its own for CI
    settings.load_profile("whole")


def examples(whole: int) -> int:
    """`max_examples` of a property that takes `whole` of them to be worth its name. Asked as tests are collected."""
    return whole // 4 if settings.get_current_profile_name() == QUICK else whole
