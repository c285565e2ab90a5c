"""The query lease: which query may publish (docs/design.md, rule 6).

One row in Postgres holds the newest token. Whoever raised it owns the lease until somebody raises it again; nobody is
asked to let go. The clock that counts is the database's. Time only decides when another may *try*: safety rests on
the token, which every batch checks under a row lock and which Redis compares in its script.

A database that went back (a failover that lost the newest owner, a backup) would give a number out again. So a token is
no count: it is made of the clock and of a random part, and is higher than the one before whatever the clock says.

The owner also holds a session advisory lock that is derived from its token. When its process dies, Postgres drops
that lock within moments, so a waiter need not sit out the time to live. Needs real sessions: a
pooler in transaction mode between us and Postgres breaks it.
"""

import secrets
import threading
import time
from dataclasses import dataclass
from typing import LiteralString, Self

from psycopg.errors import LockNotAvailable

from tidemark.common.errors import LeaseLost, Stopping, TidemarkError, Unavailable
from tidemark.common.lock_waits import run_locking, sessions_of
from tidemark.common.log import get_logger
from tidemark.common.postgres_session import Connection, Dsn, PostgresSession
from tidemark.sinks.postgres.database import session_of

log = get_logger(__name__)

_KEY = "hashtextextended('tidemark.query_lease ' || %(token)s::text, 0)"
_HOLDERS = f"""
select array_agg(pid) from pg_locks where locktype = 'advisory' and objsubid = 1 and granted
    and database = (select oid from pg_database where datname = current_database())
    and (classid::bigint << 32 | objid::bigint) = {_KEY}
"""


SPREAD = 2**20  # tokens a second: the random part; tokens stay below 2**53 until the year 2106, exact in any metric


def next_token(last: int, clock: int) -> int:
    """A token above `last` that nobody else is given; `clock` in seconds since 1970, which may have been set back."""
    return max(last, clock * SPREAD) + 1 + secrets.randbelow(SPREAD - 1)


def session_name(token: int) -> str:
    """`application_name` of the sessions that write under `token`, so that a successor can end those that hang."""
    return f"tidemark token {token}"


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """`owner` names us for people, `version` is that of our Tidemark. Times are seconds.

    `ttl` without a renewal, and the lease is up for others. `grace` is how long an owner's lost session is given to
    come back before a waiter takes over. `poll` is the pause between a waiter's attempts.
    """

    owner: str
    ttl: float = 15.0
    grace: float = 2.0
    poll: float = 0.5
    version: str = ""


class Lease:
    """A held lease, renewed by a thread of its own every `ttl / 3`. A context manager; leaving it releases."""

    def __init__(self, database: PostgresSession, config: LeaseConfig, token: int) -> None:
        self.token = token
        self.lost = threading.Event()
        self._newest = token
        self._database = database
        self._config = config
        self._session: Connection | None = None
        self._closing = threading.Event()
        self._renewal = threading.Thread(target=self._renew_until_closed, name="lease", daemon=True)

    @classmethod
    def acquire(cls, dsn: Dsn, config: LeaseConfig, stopping: threading.Event, above: int = 0) -> Self:
        """Wait for the lease and take it; may wait for ever. Raises `Stopping` soon after `stopping` is set.

        The token is higher than `above`, the highest that any sink has seen. Postgres being away is waited out too.
        Raises `Refused` where it answers and says no.
        """
        database = session_of(dsn, "tidemark lease")
        try:
            return cls(database, config, _Waiter(database, config, above).wait(stopping))
        except TidemarkError:
            database.close()
            raise

    def check(self) -> None:
        """Raise `LeaseLost` once it is known that somebody else has the lease. Cheap; asks no server."""
        if self.lost.is_set():
            raise LeaseLost(self.token, self._newest)

    def lose(self, newest: int) -> None:
        """Take note that a sink has seen the token `newest`, so that every thread stops publishing."""
        self._newest = max(self._newest, newest)
        self.lost.set()

    def give_up(self) -> None:
        """Let every thread that waits to publish stop, although nobody else has the lease. It is renewed no more."""
        self.lost.set()

    def __enter__(self) -> Self:
        self._renewal.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lease, so that a waiter has it at once. Never raises."""
        self._closing.set()
        if self._renewal.is_alive():
            self._renewal.join()
        try:
            with self._database.use() as connection, connection.transaction():
                connection.execute("set local synchronous_commit = local")
                # Expired for all to see: the next one need not wait for our session to be gone. It is still ours where
                # a sink has seen a higher token than Postgres.
                released = connection.execute(
                    "update tidemark.query_lease set expires_at = '-infinity' where token = %s", (self.token,)
                )
            if released.rowcount:
                log.info("Released the lease", token=self.token)
        except TidemarkError as problem:
            log.warning("Could not release the lease; it will expire", token=self.token, problem=str(problem))
        finally:
            self._database.close()

    def _renew_until_closed(self) -> None:
        pause = 0.0
        failing = False
        while not self._closing.wait(pause) and not self.lost.is_set():
            try:
                self._renew()
            except TidemarkError as problem:
                if not failing:  # once, not at every attempt
                    log.warning("Could not renew the lease; trying again", token=self.token, problem=str(problem))
                failing, pause = True, 0.5
            else:
                if failing and not self.lost.is_set():
                    log.info("Renewed the lease again", token=self.token)
                failing, pause = False, self._config.ttl / 3

    def _renew(self) -> None:
        with self._database.use() as connection:
            if connection is not self._session:  # a new one, which does not hold the lock yet
                self._lock(connection)
        if not run_locking(self._database, "renewing the lease", self._write_expiry, seconds=0):
            with self._database.use() as connection:
                row = connection.execute("select token from tidemark.query_lease").fetchone()
            self.lose(row[0] if row else self.token)
            log.error("Lost the lease", token=self.token, newest=self._newest)

    def _lock(self, connection: Connection) -> None:
        """Anybody may hold an advisory lock. Safety does not rest on it, so it is not waited for."""
        if _try_lock(connection, "pg_try_advisory_lock", self.token):
            self._session = connection
            return
        row = connection.execute(_HOLDERS, {"token": self.token}).fetchone()
        holders = sessions_of(connection, row[0] if row else [])
        log.warning("Another session holds the advisory lock of the lease; going on without it", holders=holders)

    def _write_expiry(self, connection: Connection) -> bool:
        # Of no use to a standby, and not to wait for one: while commits hang, the lease is still ours.
        connection.execute("set local synchronous_commit = local")
        renewed = connection.execute(
            "update tidemark.query_lease set expires_at = clock_timestamp() + %s * interval '1 second'"
            " where token = %s",
            (self._config.ttl, self.token),
        )
        return renewed.rowcount > 0


class _Waiter:
    """One process's attempts to take the lease over."""

    def __init__(self, database: PostgresSession, config: LeaseConfig, above: int) -> None:
        self._database = database
        self._config = config
        self._above = above
        self._alone_since: tuple[int, float] | None = None  # the token whose owner had no session, and since when
        self._said: tuple[str, float] | None = None

    def wait(self, stopping: threading.Event) -> int:
        while not stopping.is_set():
            try:
                with self._database.use() as connection:
                    token = self._attempt(connection)
                if token is not None:
                    log.info("Took the lease", token=token, owner=self._config.owner)
                    return token
            except Unavailable as problem:
                self._say(f"Waiting for Postgres: {problem}")
            stopping.wait(self._config.poll)
        raise Stopping("told to stop while waiting for the lease")

    def _attempt(self, connection: Connection) -> int | None:
        row = connection.execute(
            "select token, owner, to_char(since at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS UTC'),"
            " expires_at < clock_timestamp(), expires_at = '-infinity', extract(epoch from clock_timestamp())::bigint"
            " from tidemark.query_lease"
        ).fetchone()
        assert row is not None, "the migration made this row and nothing deletes it"
        token, owner, since, expired, released, clock = row
        if not released and not expired and not self._abandoned(connection, token):
            self._say(f"Waiting for the lease: {owner} holds it since {since}")
            return None
        if expired and not released:
            self._end_sessions(connection, token)
        return self._take(connection, token, next_token(max(token, self._above), clock))

    def _abandoned(self, connection: Connection, token: int) -> bool:
        """Whether the owner of `token` has had no session for the length of the grace."""
        if not _try_lock(connection, "pg_try_advisory_xact_lock", token):  # given back as the statement ends
            self._alone_since = None
            return False
        now = time.monotonic()
        if self._alone_since is None or self._alone_since[0] != token:
            self._alone_since = (token, now)
        return now - self._alone_since[1] >= self._config.grace

    def _end_sessions(self, connection: Connection, token: int) -> None:
        """End the sessions of an owner that neither renews nor dies: one of them may hold the row in a transaction."""
        ended = connection.execute(
            "select pid, pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = %s and usename = current_user and datname = current_database()",
            (session_name(token),),
        ).fetchall()
        if ended:
            log.warning("Ended sessions of the owner that did not renew", token=token, pids=[pid for pid, _ in ended])

    def _take(self, connection: Connection, token: int, ours: int) -> int | None:
        """Raise the token to `ours` in one statement that only one of several waiters can win."""
        taken = 0
        # The lock before the row: whoever sees the new token must find its owner's session there.
        if not _try_lock(connection, "pg_try_advisory_lock", ours):
            return None
        try:
            with connection.transaction():
                connection.execute("set local lock_timeout = '2s'")
                # The first batch is durable, and with it all that was written before it.
                connection.execute("set local synchronous_commit = local")
                taken = connection.execute(
                    "update tidemark.query_lease set token = %(ours)s, owner = %(owner)s, version = %(version)s,"
                    " since = clock_timestamp(), waits_for = null,"
                    " expires_at = clock_timestamp() + %(ttl)s * interval '1 second'"
                    " where token = %(token)s",
                    {
                        "owner": self._config.owner,
                        "version": self._config.version,
                        "ttl": self._config.ttl,
                        "token": token,
                        "ours": ours,
                    },
                ).rowcount
        except LockNotAvailable:
            self._say("Waiting for the lease: the last owner's batch is still being written")
        finally:
            if not taken and not connection.closed:
                connection.execute("select pg_advisory_unlock_all()")
        return ours if taken else None

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if self._said is None or self._said[0] != text or now - self._said[1] >= 30:
            log.info(text)
            self._said = (text, now)


def _try_lock(connection: Connection, function: LiteralString, token: int) -> bool:
    row = connection.execute(f"select {function}({_KEY})", {"token": token}).fetchone()
    return row is not None and bool(row[0])
