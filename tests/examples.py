"""How many examples a property is tried with: all in `make test`, an eighth in `make test-unit`, more in other targets.

No example has a deadline, and nobody minds how long it takes to draw one: on a busy machine that would say nothing of
the code.
"""

from hypothesis import HealthCheck, settings

QUICK = "quick"
"""The profile of `make test-unit`: `pytest --hypothesis-profile quick`."""

LONG = "long"
"""The profile of `make chaos-append`."""

MODEL_CHECK = "model-check"
"""The profile of `make model-check`, in which the small worlds are whole."""

UNHURRIED = (HealthCheck.too_slow,)
SHARING = (*UNHURRIED, HealthCheck.function_scoped_fixture)
"""What is not looked for in a property whose examples share a fixture: `suppress_health_check`."""

settings.register_profile(LONG, deadline=None, suppress_health_check=UNHURRIED)
settings.register_profile(MODEL_CHECK, deadline=None, suppress_health_check=UNHURRIED)
settings.register_profile("whole", deadline=None, suppress_health_check=UNHURRIED)
settings.register_profile(QUICK, max_examples=12, deadline=None, suppress_health_check=UNHURRIED)
if settings.get_current_profile_name() == "default":  # Hypothesis has one of its own for CI
    settings.load_profile("whole")


def examples(whole: int) -> int:
    """`max_examples` of a property that takes `whole` of them to be worth its name. Asked as tests are collected."""
    return {QUICK: whole // 8, LONG: whole * 40}.get(settings.get_current_profile_name(), whole)
