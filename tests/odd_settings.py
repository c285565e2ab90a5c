"""Defaults of a database that are legal, and other than those that everybody tries first."""

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

ODD = {
    "client_encoding": "LATIN1",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "standard_conforming_strings": "off",
    "row_security": "on",
    "default_transaction_isolation": "serializable",
    "lock_timeout": "20s",
    "statement_timeout": "50s",
}


def make_odd(dsn: str) -> None:
    """Set them for every later session in the database of `dsn`; of its user's own there are two."""
    at = conninfo_to_dict(dsn)
    database, user = sql.Identifier(str(at["dbname"])), sql.Identifier(str(at["user"]))
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name, value in ODD.items():
            of = sql.SQL("role {} in database {}").format(user, database)
            if name not in ("TimeZone", "IntervalStyle"):
                of = sql.SQL("database {}").format(database)
            connection.execute(sql.SQL("alter {} set {} = {}").format(of, sql.Identifier(name), sql.Literal(value)))
