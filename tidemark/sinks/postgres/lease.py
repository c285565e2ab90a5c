"""The query lease: which query may publish (docs/design.md, rule 6).

One row in Postgres has the newest token. The process that raised the token owns the lease until another process raises
the token again. The owner cannot prevent another process from raising the token. Times only decide when another process
*tries* to raise the token. Safety depends on the token alone: every batch checks the token under a row lock, and the
script in Redis compares the token.

A token consists of the clock and a random part, and is always higher than the previous token. A counter would repeat
its values after a restore, or after a failover that lost the newest owner.

The owner also takes a session advisory lock, whose key is derived from the token. If the owner's process dies, Postgres
releases the lock at once, so the next process need not wait until the lease expires. A pooler in transaction mode would
break the advisory lock, which belongs to a session.
"""

import secrets
import threading
import time
from dataclasses import dataclass
from typing import LiteralString, Self

from psycopg.errors import LockNotAvailable

from tidemark.common.errors import LeaseLost, Stopping, TidemarkError, Unavailable
from tidemark.common.log import get_logger
from tidemark.common.migrations import run_with_lock_timeout
from tidemark.common.postgres_session import Connection, Dsn, PostgresSession, describe_sessions
from tidemark.sinks.postgres.database import session_of

log = get_logger(__name__)

_LOCK_KEY = "hashtextextended('tidemark.query_lease ' || %(token)s::text, 0)"
_LOCK_OWNERS = f"""
select array_agg(pid) from pg_locks where locktype = 'advisory' and objsubid = 1 and granted
    and database = (select oid from pg_database where datname = current_database())
    and (classid::bigint << 32 | objid::bigint) = {_LOCK_KEY}
"""


# The range of the random part of a token. Until the year 2242 tokens are below 2**53, so a metric (a double) is exact.
TOKENS_PER_SECOND = 2**20


def next_token(last_token: int, clock_seconds: int) -> int:
    """Create a token that is higher than `last_token`. Another process is unlikely to create the same random part.

    `clock_seconds`: the database's time in seconds since 1970. The clock may have been set back.
    """
    return max(last_token, clock_seconds * TOKENS_PER_SECOND) + 1 + secrets.randbelow(TOKENS_PER_SECOND - 1)


def session_name(token: int) -> str:
    """The `application_name` of sessions that write under `token`, with which the next owner finds hanging sessions."""
    return f"tidemark token {token}"


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Settings of a lease.

    Attributes:
        owner: the name of this process, for messages.
        ttl_seconds: the lease expires after this time without a renewal.
        grace_seconds: an owner without a session may reconnect for this time. Then a waiting process takes the lease.
        poll_seconds: the pause between two attempts of a waiting process.
        version: the version of this Tidemark.
    """

    owner: str
    ttl_seconds: float = 15.0
    grace_seconds: float = 2.0
    poll_seconds: float = 0.5
    version: str = ""


class Lease:
    """The lease of this process. Create it with `acquire`.

    A context manager: inside the block, a thread renews the lease every `ttl_seconds / 3`. The end of the block
    releases the lease.

    Attributes:
        token: the token of this owner.
        lost: is set if this process must not publish any more: see `note_lost` and `give_up`.
    """

    def __init__(self, database: PostgresSession, config: LeaseConfig, token: int) -> None:
        self.token = token
        self.lost = threading.Event()
        self._newest_token = token
        self._was_given_up = False
        self._database = database
        self._config = config
        self._session: Connection | None = None
        self._closing = threading.Event()
        self._renewal = threading.Thread(target=self._renew_until_closed, name="lease", daemon=True)

    @classmethod
    def acquire(cls, dsn: Dsn, config: LeaseConfig, stopping: threading.Event, highest_token: int = 0) -> Self:
        """Wait for the lease without a time limit, even while Postgres is unavailable, and take the lease.

        Args:
            dsn: the address of Tidemark's database.
            config: the settings of the lease.
            stopping: ends the wait when it is set.
            highest_token: the highest token that any sink has. The new token is higher.

        Raises:
            Stopping: `stopping` was set.
            Refused: Postgres refuses the session.
        """
        database = session_of(dsn, "tidemark lease")
        try:
            return cls(database, config, _Waiter(database, config, highest_token).wait(stopping))
        except TidemarkError:
            database.close()
            raise

    def check(self) -> None:
        """Raise `LeaseLost` after a call of `note_lost` or `give_up`. Queries no server."""
        if self.lost.is_set():
            raise LeaseLost(self.token, self._newest_token, self._was_given_up)

    def note_lost(self, newest_token: int) -> None:
        """Set `lost`, because a sink or Postgres has the token of a newer owner. Every thread then stops publishing."""
        self._newest_token = max(self._newest_token, newest_token)
        self.lost.set()

    def give_up(self) -> None:
        """Set `lost`, so that the lease is not renewed, and every thread that waits to publish stops.

        Other processes cannot take the lease before `close` releases the lease or the lease expires.
        """
        self._was_given_up = True
        self.lost.set()

    def __enter__(self) -> Self:
        self._renewal.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the renewal, release the lease for a waiting process, and close the session. Errors are only logged."""
        self._closing.set()
        if self._renewal.is_alive():
            self._renewal.join()
        try:
            with self._database.use() as connection, connection.transaction():
                connection.execute("set local synchronous_commit = local")
                # Expire the lease, so that the next owner need not wait until this session ends. Compare with the token
                # of this process, not with the newest one: a sink may have a higher token than the row.
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
        is_failing = False
        while not self._closing.wait(pause) and not self.lost.is_set():
            try:
                self._renew()
            except TidemarkError as problem:
                if not is_failing:  # once, not at every attempt
                    log.warning("Could not renew the lease; trying again", token=self.token, problem=str(problem))
                is_failing, pause = True, 0.5
            else:
                if is_failing and not self.lost.is_set():
                    log.info("Renewed the lease again", token=self.token)
                is_failing, pause = False, self._config.ttl_seconds / 3

    def _renew(self) -> None:
        """Renew the lease. In a new session, first try to take the advisory lock, without waiting.

        Calls `note_lost` if another process has the lease.
        """
        with self._database.use() as connection:
            if connection is not self._session:  # a new connection, without the advisory lock
                self._take_advisory_lock(connection)
        if not run_with_lock_timeout(self._database, "renewing the lease", self._write_expiry, seconds=0):
            with self._database.use() as connection:
                row = connection.execute("select token from tidemark.query_lease").fetchone()
            self.note_lost(row[0] if row else self.token)
            log.error("Lost the lease", token=self.token, newest=self._newest_token)

    def _take_advisory_lock(self, connection: Connection) -> None:
        """Try to take the advisory lock, without waiting. If another session has the lock, log a warning.

        Safety does not depend on this lock.
        """
        if _try_lock(connection, "pg_try_advisory_lock", self.token):
            self._session = connection
            return
        row = connection.execute(_LOCK_OWNERS, {"token": self.token}).fetchone()
        sessions = describe_sessions(connection, row[0] if row else [])
        log.warning("Another session has the advisory lock of the lease; continuing without it", sessions=sessions)

    def _write_expiry(self, connection: Connection) -> bool:
        """Extend the lease by `ttl_seconds`. Returns whether this process still has the newest token."""
        # Do not wait for a standby: while commits hang, this process still has the lease.
        connection.execute("set local synchronous_commit = local")
        renewed = connection.execute(
            "update tidemark.query_lease set expires_at = clock_timestamp() + %s * interval '1 second'"
            " where token = %s",
            (self._config.ttl_seconds, self.token),
        )
        return renewed.rowcount > 0


class _Waiter:
    """Repeats the attempt of this process to take the lease."""

    def __init__(self, database: PostgresSession, config: LeaseConfig, highest_token: int) -> None:
        self._database = database
        self._config = config
        self._highest_token = highest_token
        # (token, time since which the owner of the token has had no session)
        self._no_session_since: tuple[int, float] | None = None
        self._last_log: tuple[str, float] | None = None

    def wait(self, stopping: threading.Event) -> int:
        """Wait until this process has the lease, and return its token. Raises `Stopping` and `Refused`."""
        while not stopping.is_set():
            try:
                with self._database.use() as connection:
                    token = self._attempt(connection)
                if token is not None:
                    log.info("Took the lease", token=token, owner=self._config.owner)
                    return token
            except Unavailable as problem:
                self._log(f"Waiting for Postgres: {problem}")
            stopping.wait(self._config.poll_seconds)
        raise Stopping("stopped while waiting for the lease")

    def _attempt(self, connection: Connection) -> int | None:
        """Take the lease if it is released, expired or abandoned. Returns the new token; None if the attempt failed."""
        row = connection.execute(
            "select token, owner, to_char(since at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.MS\"Z\"'),"
            " expires_at < clock_timestamp(), expires_at = '-infinity', extract(epoch from clock_timestamp())::bigint"
            " from tidemark.query_lease"
        ).fetchone()
        assert row is not None, "the migration makes this row and nothing deletes it"
        token, owner, since, expired, released, clock = row
        if not released and not expired and not self._note_missing_session(connection, token):
            self._log(f"Waiting for the lease: {owner} has had it since {since}")
            return None
        if expired and not released:
            self._end_sessions(connection, token)
        return self._take(connection, token, next_token(max(token, self._highest_token), clock))

    def _note_missing_session(self, connection: Connection, token: int) -> bool:
        """Record whether the owner of `token` has a session, by its advisory lock.

        Returns whether the owner has been without a session for the grace period.
        """
        if not _try_lock(connection, "pg_try_advisory_xact_lock", token):  # released at the end of the statement
            self._no_session_since = None
            return False
        now = time.monotonic()
        if self._no_session_since is None or self._no_session_since[0] != token:
            self._no_session_since = (token, now)
        return now - self._no_session_since[1] >= self._config.grace_seconds

    def _end_sessions(self, connection: Connection, token: int) -> None:
        """End this user's sessions that write under `token`: a session of a hanging owner may have locked the row."""
        ended = connection.execute(
            "select pid, pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = %s and usename = current_user and datname = current_database()",
            (session_name(token),),
        ).fetchall()
        if ended:
            log.warning(
                "Ended sessions of an owner that did not renew the lease",
                token=token,
                pids=[pid for pid, _ in ended],
            )

    def _take(self, connection: Connection, token: int, new_token: int) -> int | None:
        """Raise the token from `token` to `new_token`.

        Returns `new_token`; None if another process was faster, or if a transaction, such as a batch of the owner, has
        locked the row.
        """
        taken = 0
        # Take the lock before the row is written: a process that sees the new token must also see its owner's session.
        if not _try_lock(connection, "pg_try_advisory_lock", new_token):
            return None
        try:
            with connection.transaction():
                connection.execute("set local lock_timeout = '2s'")
                # This update becomes durable with the first batch.
                connection.execute("set local synchronous_commit = local")
                taken = connection.execute(
                    "update tidemark.query_lease set token = %(new_token)s, owner = %(owner)s, version = %(version)s,"
                    " since = clock_timestamp(), waits_for = null,"
                    " expires_at = clock_timestamp() + %(ttl)s * interval '1 second'"
                    " where token = %(token)s",
                    {
                        "owner": self._config.owner,
                        "version": self._config.version,
                        "ttl": self._config.ttl_seconds,
                        "token": token,
                        "new_token": new_token,
                    },
                ).rowcount
        except LockNotAvailable:
            self._log("Waiting for the lease: a transaction has locked its row, probably the owner's last batch")
        finally:
            if not taken and not connection.closed:
                connection.execute("select pg_advisory_unlock_all()")
        return new_token if taken else None

    def _log(self, text: str) -> None:
        now = time.monotonic()
        if self._last_log is None or self._last_log[0] != text or now - self._last_log[1] >= 30:
            log.info(text)
            self._last_log = (text, now)


def _try_lock(connection: Connection, function: LiteralString, token: int) -> bool:
    """Try to take the advisory lock of `token` with the SQL function `function`. Returns whether the lock was taken."""
    row = connection.execute(f"select {function}({_LOCK_KEY})", {"token": token}).fetchone()
    return row is not None and bool(row[0])
