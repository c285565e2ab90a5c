"""The table of streams' policies: what the pipeline reads every few seconds, and what operators change."""

from collections.abc import Mapping

from tidemark.sinks.postgres.acts import Acts
from tidemark.streaming.effects import Forced
from tidemark.streaming.errors import BadRecord
from tidemark.streaming.postgres_session import PostgresSession


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
        told = []
        with self._database.use() as connection, connection.transaction():
            # One after the other: what an act says that it found, it found.
            connection.execute("lock table tidemark.policies in share row exclusive mode")
            acts = Acts(self._database)
            noted = acts.note(name, Forced("", 0, "POLICY", 0, 0, by, why))
            given = self.given().get(name, {})
            for setting, value in changes.items():
                was = given.get(setting)
                if value is not None:
                    connection.execute(
                        "insert into tidemark.policies (stream, setting, value, act) values (%s, %s, %s, %s)"
                        " on conflict (stream, setting) do update set value = excluded.value, act = excluded.act",
                        (name, setting, value, noted.number),
                    )
                elif was is None:
                    raise BadRecord("not_set", f"the policy {name} says nothing of {setting}")
                else:
                    connection.execute(
                        "delete from tidemark.policies where (stream, setting) = (%s, %s)", (name, setting)
                    )
                told.append(f"{setting}: {_said(was)} -> {_said(value)}")
            acts.close(noted, ", ".join(told))
        return noted.number, ", ".join(told)


def _said(value: int | None) -> str:
    return "not set" if value is None else str(value)
