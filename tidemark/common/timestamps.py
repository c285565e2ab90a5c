"""The text of a time: one format in every message and every command."""

from datetime import UTC, datetime


def timestamp(moment: datetime) -> str:
    """Format a time in UTC, with milliseconds: `2026-11-26 08:00:00.123Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
