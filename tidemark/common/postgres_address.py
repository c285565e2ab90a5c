"""Addresses of Postgres databases: URLs, or key=value words of libpq. Errors and messages do not show the password."""

import re

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from tidemark.common.errors import BadSetting

# If the host of the server fails, a batch must not wait for two hours, which is the default of TCP.
_CONNECTION_DEFAULTS = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "client_encoding": "UTF8",
}

_URL_PATTERN = re.compile(r"postgres(ql)?://")


def parse_dsn(dsn: str) -> dict[str, str]:
    """The parameters in `dsn`: name -> value. Raises `ValueError`, without a part of `dsn`, if `dsn` is not valid.

    A URL with `@` in the host or in the database is not valid: the password has a character that is not
    percent-encoded, so libpq takes a part of the password for the host, the port or the database. Messages show these.
    """
    try:
        parameters = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    except psycopg.ProgrammingError:  # the original error may quote the password
        parameters = None
    shown = "" if parameters is None else f"{parameters.get('host', '')[1:]} {parameters.get('dbname', '')}"
    if parameters is None or (_URL_PATTERN.match(dsn) and "@" in shown):
        raise ValueError(
            "not a Postgres URL (postgresql://user:password@host:5432/database, with special characters of the"
            " password percent-encoded)"
        )
    return parameters


def address(dsn: str, setting: str = "dsn") -> str:
    """The host, port and database of `dsn`, without user and password, for messages. `setting`: see `conninfo`."""
    parts = {**_environment_defaults(), **_parse(dsn, setting)}
    return f"{parts.get('host') or 'localhost'}:{parts.get('port') or 5432}/{parts.get('dbname') or ''}"


def conninfo(dsn: str, application: str, setting: str = "dsn") -> str:
    """Add `application` and other defaults for parameters that `dsn` omits. `setting` names `dsn` in a `BadSetting`."""
    return make_conninfo(**{**_CONNECTION_DEFAULTS, "application_name": application, **_parse(dsn, setting)})


def _environment_defaults() -> dict[str, str]:
    """The defaults of libpq, from `PGHOST` and other variables, for parameters that an address omits."""
    return {option.keyword.decode(): option.val.decode() for option in Conninfo.get_defaults() if option.val}


def _parse(dsn: str, setting: str) -> dict[str, str]:
    try:
        return parse_dsn(dsn)
    except ValueError as error:
        raise BadSetting(setting, f"is {error}") from None
