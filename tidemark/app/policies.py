"""The pipeline follows the policies of its streams (`streaming.values.policies`), as they are changed while it runs."""

from collections.abc import Callable
from dataclasses import replace

from tidemark.common.errors import ConfigurationChanged, Unavailable
from tidemark.common.log import get_logger
from tidemark.sinks.background import LeasedThread
from tidemark.sinks.postgres.lease import Lease
from tidemark.sinks.postgres.operators import PolicyTable
from tidemark.streaming.values.policies import Policies

log = get_logger(__name__)

SECONDS = 2.0  # between two looks
SHOWN = 10  # names in the log


class PolicyWatch(LeasedThread):
    """Tells `follow` of policies that differ from those it had. A query has the bounds that it began with: so where
    these differ the `failure` asks for one that begins anew.
    """

    def __init__(
        self, table: PolicyTable, lease: Lease, policies: Policies, follow: Callable[[Policies], None]
    ) -> None:
        super().__init__("policies", lease)
        self._table = table
        self._policies = policies
        self._follow = follow
        self._away = False

    def work(self) -> float:
        try:
            given = self._table.given()
        except Unavailable as problem:
            if not self._away:
                log.warning("Could not read the policies; trying again", problem=str(problem))
            self._away = True
            return SECONDS
        self._away = False
        if given != self._policies.given:
            before, self._policies = self._policies, replace(self._policies, given=given)
            changed = [name for name in sorted({*given, *before.given}) if given.get(name) != before.given.get(name)]
            log.info("Follows other policies", changed=changed[:SHOWN], count=len(changed))
            self._follow(self._policies)
            if self._policies.bounds() != before.bounds():
                self.failure = ConfigurationChanged("bounds of streams")
        return SECONDS
