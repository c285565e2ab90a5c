"""How many examples a property is tried with: all in `make test`, a quarter in `make test-unit`, more in a torture.

No example has a deadline: on a busy machine that would say nothing of the code.
"""

from hypothesis import settings

QUICK = "quick"
"""The profile of `make test-unit`: `pytest --hypothesis-profile quick`."""

LONG = "long"
"""The profile of `make append-torture`."""

settings.register_profile(LONG, deadline=None)
settings.register_profile("whole", deadline=None)
settings.register_profile(QUICK, max_examples=25, deadline=None)
if settings.get_current_profile_name() == "default":  # Hypothesis has one of its own for CI
    settings.load_profile("whole")


def examples(whole: int) -> int:
    """`max_examples` of a property that takes `whole` of them to be worth its name. Asked as tests are collected."""
    return {QUICK: whole // 4, LONG: whole * 40}.get(settings.get_current_profile_name(), whole)
