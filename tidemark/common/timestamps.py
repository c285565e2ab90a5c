"""The format of times in messages and in the output of commands."""

from datetime import UTC, datetime


def timestamp(moment: datetime) -> str:
    """Format a time in UTC, with milliseconds: `2026-11-26 08:00:00.123Z`. A naive `moment` counts as local time."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
