"""The command line. A verb is a subcommand. `VERBS` lists the verbs. The module of a verb is imported at its first use.

Exit codes:

- 0: success.
- 1: the command failed, or found a problem or a difference (such as `doctor` and `verify`).
- 2: a person must correct something: wrong usage, a wrong setting, or any other `Stop`.
- 3: a check of `--check` failed, the effect of a change was not confirmed in time, or `replay` could not compare a
  stream.
- 130: Ctrl-C.
"""

import atexit
import gc
import os
import sys
from importlib import import_module
from typing import Any, Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from tidemark.app.commands import CommandGroup, preload_settings
from tidemark.app.output import one_line
from tidemark.common.errors import ExtraMissing, TidemarkError
from tidemark.common.gc_tuning import gc_disabled


class Verb(NamedTuple):
    """A subcommand of `tidemark`.

    Attributes:
        module: the name of the module in `tidemark.app.verbs`.
        extra: the extra of the package that the module needs; empty: none.
        summary: the description of the verb in `tidemark --help`.
    """

    module: str
    extra: str
    summary: str


SECTIONS: Final[dict[str, dict[str, Verb]]] = {
    "Run": {
        "up": Verb("up", "local", "Run the whole local stack: Kafka, Postgres, Redis, pipeline, relay and sidecar."),
        "config": Verb("run", "", "Print the effective settings and the source of each."),
        "migrate": Verb("run", "", "Create or update Tidemark's schema in Postgres."),
        "topics": Verb("run", "pipeline", "Create the Kafka topics that are missing, and check the others."),
        "pipeline": Verb("run", "pipeline", "Read records from Kafka and publish positions."),
        "sidecar": Verb("run", "sidecar", "Serve positions over HTTP and the line protocol."),
        "relay": Verb("sources", "relay", "Send the facts that services wrote with tidemark.append() to Kafka."),
        "follow": Verb("sources", "sidecar", "Copy the published positions into a database of readers."),
        "synapse": Verb("sources", "synapse", "Send the streams of a Synapse homeserver to Kafka."),
        "simulate": Verb("run", "local", "Run processes that write and read, and inject faults."),
    },
    "Write and read": {
        "produce": Verb("kafka_records", "relay", "Send records from a file of JSON lines to Kafka."),
        "tail": Verb("kafka_records", "sidecar", "Show the records of a stream in Kafka."),
        "wait": Verb("follow", "sidecar", "Wait until a stream is complete up to a token or an ID."),
        "listen": Verb("follow", "", "Show what a sidecar sends over the line protocol."),
    },
    "Inspect": {
        "status": Verb("status", "sidecar", "Show the positions of all streams and their writers, and the pipeline."),
        "top": Verb("status", "sidecar", "Show `status` and `gaps`, every two seconds."),
        "gaps": Verb("gaps", "sidecar", "Show the gaps and silent writers, and the command that settles each of them."),
        "explain": Verb("explain", "sidecar", "Show why a stream was blocked at a given time."),
        "trace": Verb("trace", "sidecar", "Show the history of one ID, from its Kafka record to its publication."),
        "verify": Verb("verify", "sidecar", "Compare Postgres, Redis and sidecars."),
        "replay": Verb("replay", "pipeline", "Apply recorded records again and compare with the history."),
        "doctor": Verb("doctor", "", "Check this machine, settings and servers, and show how to repair problems."),
        "bundle": Verb("bundle", "sidecar", "Write an archive for a fault report."),
    },
    "Settle": {
        "skip": Verb("overrides", "sidecar", "Settle a range of IDs that a writer left open."),
        "retire": Verb("overrides", "sidecar", "Stop waiting for a writer."),
        "join": Verb("overrides", "sidecar", "Send the JOIN of a writer that never joined."),
        "fence": Verb("overrides", "sidecar", "End the epoch of a writer whose process cannot be stopped."),
        "overrides": Verb("override_log", "sidecar", "List operator overrides: author, time and reason."),
    },
    "Repair": {
        "late": Verb("late", "sidecar", "List and resolve facts that completed after readers had passed them."),
        "dead-letters": Verb("dead_letters", "sidecar", "List, show and replay rejected records."),
        "readers": Verb("readers", "sidecar", "List readers, move their places, and retry or drop parked facts."),
        "policy": Verb("policy", "sidecar", "Set limits, alert thresholds and retention for single streams."),
        "reseed": Verb("reseed", "pipeline", "Change the number of shards of a stopped pipeline."),
    },
}
VERBS: Final = {name: verb for section in SECTIONS.values() for name, verb in section.items()}


DOCTOR_HINT: Final = "`tidemark doctor` checks this machine"
"""The last sentence of the text of each Tidemark error of `tidemark up`."""
_VERB_KEY: Final = "tidemark.verb"
"""The key of the verb's name in the `meta` of click's context."""
_LIBRARY_VARIABLES: Final = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy would start a thread for each core; Tidemark uses no linear algebra
}
"""Environment variables that reduce the CPU time of imports. A variable that is already set keeps its value."""


class LazyGroup(CommandGroup):
    """A command group that imports each command when it is used (click's pattern for lazy subcommands)."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for name, text in _LIBRARY_VARIABLES.items():
            os.environ.setdefault(name, text)
        # The last collection at exit would search all modules for cycles: 0.06 s of CPU time of `tidemark status`.
        atexit.register(gc.freeze)
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*VERBS, *(name for name in self.commands if name not in VERBS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands or cmd_name not in VERBS:
            return super().get_command(ctx, cmd_name)
        name = f"tidemark.app.verbs.{VERBS[cmd_name].module}"
        is_imported = name in sys.modules
        try:
            with gc_disabled():
                module = import_module(name)
                if not is_imported:
                    # Modules live as long as the process. The collector must not scan them when it is enabled again.
                    gc.freeze()
        except ModuleNotFoundError as error:
            raise _extra_missing(error, cmd_name) from None
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        ctx.meta[_VERB_KEY] = args[0]
        if args[0] in VERBS and args[0] != "doctor" and not ctx.resilient_parsing and not {"--help", "-h"} & {*args}:
            with gc_disabled():
                preload_settings(ctx)  # before the slow import of the verb, so that a wrong setting is reported at once
                gc.freeze()
        return super().resolve_command(ctx, args)

    def run_command(self, ctx: click.Context) -> Any:
        try:
            return super().run_command(ctx)
        except ModuleNotFoundError as error:
            if ctx.invoked_subcommand not in VERBS:
                raise
            raise _extra_missing(error, ctx.invoked_subcommand) from None

    def error_text(self, ctx: click.Context, error: TidemarkError) -> str:
        if ctx.meta.get(_VERB_KEY) == "up":
            return f"{one_line(error)}. {DOCTOR_HINT}"
        return super().error_text(ctx, error)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, verb.summary) for name, verb in verbs.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        items = [CompletionItem(name, help=verb.summary) for name, verb in VERBS.items() if name.startswith(incomplete)]
        return items + click.Command.shell_complete(self, ctx, incomplete)


def _extra_missing(error: ModuleNotFoundError, verb: str) -> Exception:
    if not VERBS[verb].extra:
        return error
    return ExtraMissing.for_import_error(error, f"tidemark {verb}", VERBS[verb].extra)


EXAMPLES: Final = """
\b
Examples:
  tidemark up --demo               run everything on this machine, with demo writers
  tidemark status                  show positions, what blocks them, and the pipeline
  tidemark gaps orders             show what blocks the stream orders, and how to settle it
  tidemark wait orders 4711        wait until orders is complete up to ID 4711
  tidemark doctor                  find out why something does not work

\b
Shell completion:
  bash   eval "$(_TIDEMARK_COMPLETE=bash_source tidemark)"
  zsh    eval "$(_TIDEMARK_COMPLETE=zsh_source tidemark)"
  fish   _TIDEMARK_COMPLETE=fish_source tidemark | source
"""


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=EXAMPLES,
)
@click.version_option(package_name="tidemark")
def main() -> None:
    """Publish how far readers of an append-only table can read without missing a row that commits later.

    Settings come from environment variables TIDEMARK_...: `tidemark config` shows them, `tidemark doctor` checks them.
    """


if __name__ == "__main__":
    main()
