"""The turn of a bridge, taken by a test."""

import psycopg

from tidemark.common.postgres_session import BRIDGE_LOCK_SPACE, Connection
from tidemark.sources.run_loop import StandbyLocks
from tidemark.sources.synapse import state


def take_turn(connection: psycopg.Connection | Connection, names: list[str]) -> bool:
    """Whether this session has the turn of these streams now."""
    return StandbyLocks(BRIDGE_LOCK_SPACE).take(connection, state.read_lock_keys(connection, names))
