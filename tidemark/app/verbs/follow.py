"""`tidemark wait` and `tidemark listen`: wait for positions, and show them as they are published."""

import json
import math
import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from tidemark.app.commands import Amount, CommandFailed, CommandStopped, Utf8Command, load_settings, unknown_stream_text
from tidemark.app.connections import parse_host_port
from tidemark.app.lines import client
from tidemark.app.logs import run_in_thread
from tidemark.app.output import progress, shows_progress
from tidemark.app.serving.tls_listener import client_tls_context
from tidemark.common.errors import NotReached, Reject, StreamNotKnown, TidemarkError

if TYPE_CHECKING:
    from tidemark.app.settings import Settings
    from tidemark.sinks.reader import Token

POLL_SECONDS: Final = 0.5  # between two reads of the positions for the progress bar


@click.command("wait", cls=Utf8Command)
@click.argument("stream")
@click.argument("token")
@click.option("--writer", help="Wait only for this writer; TOKEN must be an ID. Default: wait for all writers.")
@click.option("--timeout", type=Amount(min=0), default=60.0, show_default=True, help="Seconds to wait; inf: forever.")
@click.option("--json", "as_json", is_flag=True, help="For programs: one JSON object.")
def wait(stream: str, token: str, writer: str | None, timeout: float, *, as_json: bool) -> None:
    """Wait until STREAM is complete up to TOKEN (m7~web.9, or an ID).

    Exit code 1 after the timeout, 2 if the stream does not exist or TOKEN is not a token of the stream.
    """
    settings = load_settings()
    from tidemark.sinks.reader import Positions

    target = int(token) if re.fullmatch(r"-?\d{1,19}", token) else token
    if writer is not None and isinstance(target, str):
        raise click.UsageError("with --writer, TOKEN must be an ID")
    with Positions(settings.redis, settings.postgres()) as positions:
        try:
            with _show_progress(settings, stream, target, writer):
                position = positions.wait(stream, target, writer, None if math.isinf(timeout) else timeout)
        except (Reject, NotReached) as problem:
            if isinstance(problem, StreamNotKnown) or (isinstance(problem, NotReached) and not problem.may_exist):
                raise CommandStopped(unknown_stream_text(stream)) from None
            if isinstance(problem, Reject):
                raise CommandStopped(str(problem)) from None
            if problem.position is None:
                raise CommandFailed(f"{problem}: Redis may be recovering, so try again") from None
            if problem.is_ahead:
                raise CommandFailed(str(problem)) from None
            raise CommandFailed(f"{problem}; `tidemark gaps {shlex.quote(stream)}` shows what blocks it") from None
    if as_json:
        answer = {
            "stream": stream,
            "linear": position.linear,
            "vector": dict(position.vector),
            "token": str(position.token),
        }
        click.echo(json.dumps(answer))
    else:
        click.echo(f"{stream} is at {position.token}")


@contextmanager
def _show_progress(settings: "Settings", stream: str, target: str | int, writer: str | None) -> Iterator[None]:
    """Show a progress bar on a terminal while the block runs: how many of the missing IDs are complete.

    A second thread reads the positions. Raises `BadToken` if `target` is neither a token nor an ID.
    """
    if not shows_progress():
        yield
        return
    from tidemark.sinks.reader import Positions, PositionSnapshot, target_token

    goal, block_ended = target_token(target, writer), threading.Event()

    def show() -> None:
        bar, advance, missing = ExitStack(), None, 0
        with bar, Positions(settings.redis, settings.postgres()) as positions:
            while True:
                is_last = block_ended.wait(POLL_SECONDS)
                if is_last and advance is None:
                    return
                with suppress(TidemarkError):  # the block reports a server that does not answer
                    snapshot = positions.get(stream)
                    if isinstance(snapshot, PositionSnapshot):
                        before, missing = missing, _missing_ids(goal, snapshot.token)
                        if advance is None:
                            top = goal.farthest()
                            label = f"{stream} from ID {top - missing if top > 0 else top + missing} to {top}"
                            advance = bar.enter_context(progress(label, missing, "ID"))
                        else:
                            advance(before - missing)
                if is_last:
                    return

    with run_in_thread(show, block_ended):
        yield


def _missing_ids(goal: "Token", current: "Token") -> int:
    """The largest number of IDs by which a position of `current` is below the same position of `goal`; 0 if all
    positions have reached `goal`."""
    pairs = [(goal.linear, current.linear), *((id, current.at(writer)) for writer, id in goal.positions)]
    return max(0, *(abs(wanted) - abs(reached) for wanted, reached in pairs))


@click.command("listen", cls=Utf8Command)
@click.argument("address", required=False)
@click.option("--stream", "streams", multiple=True, help="Show only this stream; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="For programs: a JSON object in each line.")
@click.option("--server", help="Expected name of the server; exit code 2 if its name differs.")
@click.option(
    "--tls",
    is_flag=True,
    help="Use TLS, with the system's certificate authorities unless TIDEMARK_SIDECAR_CA_FILE is set.",
)
def listen(address: str | None, streams: tuple[str, ...], server: str | None, *, as_json: bool, tls: bool) -> None:
    """Show what a sidecar sends over the line protocol at ADDRESS (host:port; default: TIDEMARK_LINES_LISTEN), until
    Ctrl-C. Connects again after each loss of the connection."""
    settings = load_settings()
    chosen = address or settings.lines_listen
    try:
        where = parse_host_port(chosen)
    except ValueError as problem:
        raise click.BadParameter(f"{chosen!r} is {problem}", param_hint="ADDRESS") from None
    show = client.to_json if as_json else str if settings.no_color else client.to_colored_text
    trust = partial(client_tls_context, settings.sidecar_ca_file) if tls or settings.sidecar_ca_file else None
    for command in client.LinesClient(where, server, trust).commands():
        if client.should_print(command, streams):
            click.echo(show(command))
