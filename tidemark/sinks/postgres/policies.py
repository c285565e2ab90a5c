"""The table of streams' policies: what the pipeline reads every few seconds, and what operators change."""

from collections.abc import Mapping

from psycopg.errors import NoDataFound

from tidemark.common.errors import BadRecord
from tidemark.common.postgres_session import PostgresSession, first_line


class PolicyTable:
    """Needs the role tidemark_reader; to change, also tidemark_operator. Raises `Unavailable` and `Refused`."""

    def __init__(self, database: PostgresSession) -> None:
        self._database = database

    def given(self) -> dict[str, dict[str, int]]:
        """Name -> setting -> value; nothing where the schema is of a version that has none."""
        found: dict[str, dict[str, int]] = {}
        with self._database.use() as connection:
            if not connection.execute("select 1 where to_regclass('tidemark.policies') is not null").fetchone():
                return found
            rows = connection.execute("select stream, setting, value from tidemark.policies order by 1, 2")
            for name, setting, value in rows:
                found.setdefault(name, {})[setting] = value
        return found

    def change(self, name: str, changes: Mapping[str, int | None], by: str, why: str) -> tuple[int, str]:
        """Set these of the policy, take back what is None; all or none. Gives the number of the act and what it did.

        `BadRecord` where one to take back is not set.
        """
        with self._database.use() as connection:
            try:
                row = connection.execute(
                    "select act, outcome from tidemark.change_policy(%s, %s::text[], %s::bigint[], %s, %s)",
                    (name, [*changes], [*changes.values()], by, why),
                ).fetchone()
            except NoDataFound as error:
                raise BadRecord("not_set", first_line(error)) from None
        assert row is not None
        return int(row[0]), str(row[1])
