import json
import os
import re
import shutil
import signal
import subprocess
import sys
from ast import literal_eval
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.terminals import shown_on_a_terminal
from tidemark.app import cli
from tidemark.app.cli import VERBS, main
from tidemark.app.commands import require_confirmation, unknown_stream_text
from tidemark.app.stack.home import AlreadyRunning, NeedsNamedUser
from tidemark.app.stack.postgres import NeedsOrdinaryUser, PostgresServer
from tidemark.app.stack.processes import StartFailed, free_port
from tidemark.app.stack.up import JarsUnavailable, PortTaken
from tidemark.app.verbs import up
from tidemark.app.versions import JavaUnfit
from tidemark.common.environment import child_environment
from tidemark.common.errors import BadSetting, Stop, TidemarkError, Unavailable

ALL = {name: command for name in VERBS if (command := main.get_command(click.Context(main), name))}
COMMANDS = [
    name
    for name, command in ALL.items()
    if not isinstance(command, click.Group)
    and not any(it.required for it in command.params)
    and name != "doctor"  # it reports a wrong setting itself
]


EACH = """
import sys
from click.testing import CliRunner
from tidemark.app.cli import main
for command in sys.argv[1:]:
    done = CliRunner().invoke(main, [command])
    loaded = {"confluent_kafka", "numpy", "pyspark", "redis", "structlog"} & {*sys.modules}
    print((done.exit_code, done.stdout, done.stderr, loaded))
"""
"""Says of each command how it ended, what it said where, and which heavy libraries are loaded by then."""


def _python(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = child_environment(changes)
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def _tidemark(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return _python("-m", "tidemark.app.cli", *words, **changes)


def test_help_lists_every_command() -> None:
    """The help is the index of what a person can do."""
    done = _tidemark("--help")
    for command in VERBS:
        assert f"  {command} " in done.stdout


def test_wrong_setting_is_told_in_one_line() -> None:
    """A wrong value ends any command with exit code 2 and one line, without a stack trace, before it loads what it
    needs."""
    done = _python("-c", EACH, *COMMANDS, TIDEMARK_UP_REDIS_PORT="many")
    assert (done.returncode, done.stderr) == (0, "")
    ended = map(literal_eval, done.stdout.splitlines())
    for command, (code, said, error, loaded) in zip(COMMANDS, ended, strict=True):
        assert (command, code, said, loaded) == (command, 2, "", set())
        assert error.startswith("Error: TIDEMARK_UP_REDIS_PORT: 'many' is not allowed")
        assert error.count("\n") == 1


FAILURES = [
    StartFailed("kafka", "it ended with code 1", "no space; its log: kafka.log"),
    PortTaken("redis", 6379, "Address already in use"),
    JavaUnfit("there is no java on the PATH"),
    JarsUnavailable("timeout", Path("ivy.log")),
    AlreadyRunning(Path("home"), "7"),
    NeedsNamedUser(54321),
    NeedsOrdinaryUser(),
    BadSetting("TIDEMARK_HOME", "cannot write in /proc"),
    Unavailable("Postgres", "127.0.0.1:5432", "timeout"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_start_that_fails_names_the_doctor(failure: TidemarkError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error of `up` has one line, which ends with the command that checks the machine."""

    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(up, "run", fail)
    done = CliRunner().invoke(main, ["up"])
    assert done.exit_code == (2 if isinstance(failure, Stop) else 1)
    assert done.stderr == f"Error: {failure}. `tidemark doctor` checks this machine\n"


def test_a_wrong_setting_and_a_missing_extra_of_a_start_name_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found before `up` runs. The errors of other commands do not name it."""
    wrong = CliRunner(env={"TIDEMARK_UP_REDIS_PORT": "many"})
    assert wrong.invoke(main, ["up"]).stderr.endswith(". `tidemark doctor` checks this machine\n")
    assert "doctor" not in wrong.invoke(main, ["status"]).stderr

    def missing(_: str) -> None:
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")

    monkeypatch.setattr(cli, "import_module", missing)
    shown = CliRunner().invoke(main, ["up"]).stderr
    assert shown.endswith("pip install 'tidemark-streams[local]'. `tidemark doctor` checks this machine\n")


def test_nan_is_no_number() -> None:
    """No clock ever reaches it: what waits so long would not end."""
    found = [
        (command, option.opts[-1])
        for command in ALL.values()
        for option in command.params
        if isinstance(option.type, click.FloatRange)
    ]
    assert {"--wait", "--timeout"} <= {option for _, option in found}
    for command, option in found:
        words = {"skip": ["s", "w", "1"], "retire": ["s", "w"], "join": ["s", "w"], "wait": ["s", "m1"]}
        done = CliRunner().invoke(command, [*words.get(command.name or "", []), option, "nan"])
        assert (done.exit_code, "is not a number" in done.output) == (2, True), (command.name, done.output)


def test_what_is_not_utf_8_is_wrong_usage() -> None:
    """Wherever it stands, and told in a way that every terminal can show."""
    for words in (("status", "\udcff"), ("skip", "events", "a", "3", "--by", "ada", "--why", "\udcfe")):
        done = _tidemark(*words)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert f"{words[-1]!a} is not UTF-8" in done.stderr


def test_nobody_is_asked_where_standard_input_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has none then; a daemon starts commands so."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(click.UsageError, match="add --yes"):
        require_confirmation("a", "the writer's name", yes=False)


def test_server_that_is_away_is_told_in_one_line() -> None:
    """A command that asks once and finds no server says which one and where, without its password."""
    done = _tidemark("status", TIDEMARK_POSTGRES_DSN="postgresql://ada:hunter2@127.0.0.1:1/tidemark")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "hunter2" not in done.stderr


def test_status_of_an_unprepared_database_says_what_to_run(database: str) -> None:
    """Without the schema, status names the command that makes it; after that it says that nothing was read yet."""
    before = _tidemark("status", TIDEMARK_POSTGRES_DSN=database)
    assert before.returncode == 2
    assert "tidemark migrate" in before.stderr
    assert _tidemark("migrate", TIDEMARK_POSTGRES_DSN=database).stdout.startswith("applied migration")
    assert _tidemark("migrate", TIDEMARK_POSTGRES_DSN=database).stdout == "the schema is up to date\n"
    empty = _tidemark("status", TIDEMARK_POSTGRES_DSN=database).stdout
    assert empty.startswith("no streams yet: a stream appears within seconds after a writer sends its first record")
    checked = _tidemark("status", "--check", TIDEMARK_POSTGRES_DSN=database)
    assert checked.returncode == 3
    assert "problem: no pipeline has ever used this database" in checked.stdout
    assert _tidemark("gaps", "--check", TIDEMARK_POSTGRES_DSN=database).stdout == "no gaps: nothing is blocked\n"
    assert _tidemark("gaps", "orders", TIDEMARK_POSTGRES_DSN=database).returncode == 1
    unknown = _tidemark("status", "orders", TIDEMARK_POSTGRES_DSN=database)
    assert unknown.returncode == 1
    assert "there is no stream orders" in unknown.stderr


def test_what_prepares_a_database_has_a_result_for_programs(database: str) -> None:
    """Each migration prints one object, which conforms to its schema."""
    cli = CliRunner(env={"TIDEMARK_POSTGRES_DSN": database})

    def printed(*words: str) -> Any:
        done = cli.invoke(main, [*words, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    applied = printed("migrate")["applied"]
    assert applied == [*range(1, len(applied) + 1)]
    assert printed("migrate") == {"applied": []}
    first = printed("relay", "migrate", "--stream", "orders")
    assert first["applied"]
    assert (first["readers_installed"], first["streams"]) == (True, [{"stream": "orders", "created": True}])
    again = {"applied": [], "readers_installed": False, "streams": [{"stream": "orders", "created": False}]}
    assert printed("relay", "migrate", "--stream", "orders") == again
    assert printed("follow", "migrate") == {"installed": False}
    assert printed("synapse", "migrate")["applied"]
    assert printed("synapse", "migrate") == {"applied": []}
    assert printed("relay", "blockers") == {"blockers": []}
    assert printed("relay", "retire", "nobody") == {"writer": "nobody", "retired": []}
    assert printed("synapse", "retire", "nobody") == {"writer": "nobody", "retired": []}


def test_the_log_and_a_progress_bar_do_not_share_a_line(database: str) -> None:
    """On a terminal, a line of the log replaces the bar, which is drawn again below."""
    program = "from tidemark.app.cli import main; main(['migrate'])"
    shown = shown_on_a_terminal(program, environment={"TIDEMARK_POSTGRES_DSN": database})
    bars = [line for line in re.sub(r"[^\n]*\r\x1b\[K", "", shown).splitlines() if "migrating" in line]
    assert "Migrated the database" in shown
    assert "migrations/s" in bars[-1]
    assert not [line for line in bars if "Migrated" in line]


def test_config_has_a_form_for_programs() -> None:
    """The same values and sources as in the text; no secret."""
    variables = {"TIDEMARK_REDIS_PASSWORD": "hunter2", "TIDEMARK_SHARD": "3"}
    done = CliRunner(env=variables).invoke(main, ["config", "--json"])
    shown = json.loads(done.stdout)
    settings = {row["name"]: row for row in shown["settings"]}
    assert settings["TIDEMARK_REDIS_PASSWORD"] == {
        "name": "TIDEMARK_REDIS_PASSWORD", "value": "***", "source": "environment",
    }  # fmt: skip
    assert settings["TIDEMARK_KAFKA_USERNAME"]["value"] is None
    assert shown["unknown"] == [{"name": "TIDEMARK_SHARD", "similar": "TIDEMARK_SHARDS"}]
    assert "hunter2" not in done.output


COMPLETING = "import sys; sys.argv = ['tidemark']; from tidemark.app.cli import main; main()"


def _completed(*words: str) -> list[str]:
    """What bash offers for the last of the words, as the function asks for it that `bash_source` prints."""
    position = {"COMP_WORDS": " ".join(["tidemark", *words]), "COMP_CWORD": str(len(words))}
    environment = child_environment({"TIDEMARK_UP_REDIS_PORT": "many"}) | {
        "_TIDEMARK_COMPLETE": "bash_complete",
        **position,
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPLETING], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_the_shell_completes_verbs_and_options() -> None:
    """Also the verbs of a group, and values of an option with choices. A wrong setting is no obstacle."""
    assert {*VERBS} == {*_completed("")}
    assert _completed("re") == [name for name in VERBS if name.startswith("re")]
    assert _completed("readers", "s") == ["seek", "show"]
    assert {"--json", "--check", "--help"} <= {*_completed("status", "-")}
    assert _completed("relay", "migrate", "--direction", "b") == ["backward"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("statsu", "No such command 'statsu'. Did you mean 'status'?"),
        ("retier orders", "No such command 'retier'. Did you mean 'retire' or 'readers'?"),
        ("readers lst", "No such command 'lst'. Did you mean 'list'?"),
        ("xyzzy", "No such command 'xyzzy'."),
        (
            "explain sales 77",
            "unexpected argument '77': `tidemark explain` takes times, with --at or --between. For one ID, run:"
            " tidemark trace STREAM ID",
        ),
    ],
)
def test_wrong_usage_names_what_was_perhaps_meant(words: str, error: str) -> None:
    """Verbs, verbs of a group, and the verb for one ID."""
    done = CliRunner().invoke(main, words.split())
    assert (done.exit_code, done.output.splitlines()[-1]) == (2, f"Error: {error}")


def test_a_mistyped_option_gets_a_suggestion() -> None:
    done = CliRunner().invoke(main, ["status", "--jsn"])
    assert (done.exit_code, "--json" in done.output) == (2, True)


def test_a_mistyped_stream_gets_a_suggestion() -> None:
    assert unknown_stream_text("sale", ["orders", "sales"]) == (
        "there is no stream sale; did you mean sales? `tidemark status` shows all streams"
    )
    assert unknown_stream_text("x", ["orders"]) == "there is no stream x; `tidemark status` shows all streams"


def test_ctrl_c_ends_without_a_stack_trace() -> None:
    """Ctrl-C is no error: exit code 130, as shells have it, and nothing of Python's on the screen."""
    # In short naps: Python misses a signal that comes just before it falls asleep.
    wait = "lambda: (print('here', flush=True), [time.sleep(0.1) for _ in range(600)])"
    # A shell starts its background jobs deaf to Ctrl-C, and this test may run in one.
    hear = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = f"from tidemark.app.cli import main; main.command('wait')({wait}); main(['wait'])"
    program = f"import signal, time; {hear}; {run}"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


ALL_HEAVY = {
    "aiohttp", "confluent_kafka", "curses", "httpx", "numba", "numpy", "pandas", "prometheus_client", "psycopg",
    "pyarrow", "pyspark", "redis", "starlette", "structlog", "uvicorn",
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--help", set[str]()),
        ("config", {"psycopg"}),
        ("status", {"confluent_kafka", "numpy", "psycopg"}),
        ("top --times 1", {"confluent_kafka", "numpy", "psycopg"}),
        ("gaps", {"numpy", "psycopg"}),
        ("explain shop", {"numpy", "psycopg"}),
        ("trace shop 1", {"confluent_kafka", "numpy", "psycopg", "redis"}),
        ("verify", {"numpy", "psycopg", "redis"}),
        ("overrides list", {"psycopg"}),
        ("late list", {"psycopg"}),
        ("dead-letters list", {"confluent_kafka", "numpy", "psycopg"}),
        ("readers list", {"psycopg", "redis"}),
        ("policy list", {"psycopg"}),
    ],
)
def test_a_command_imports_no_library_that_it_does_not_need(words: str, needed: set[str]) -> None:
    """Imports are most of the CPU time of a command that people type again and again."""
    loaded = _after_command(words, "print(*sys.modules)").split()
    assert ALL_HEAVY & {*loaded} <= needed


def test_imports_of_a_command_start_no_threads() -> None:
    """Otherwise numpy would start a thread of OpenBLAS for each core, which would take CPU time. A user's own value is
    kept."""
    threads = "import os, numpy; print(os.environ['OPENBLAS_NUM_THREADS'], len(os.listdir('/proc/self/task')))"
    if not Path("/proc/self/task").exists():
        pytest.skip("shows no threads")
    assert _after_command("gaps", threads) == "1 1\n"
    assert _after_command("gaps", threads, OPENBLAS_NUM_THREADS="2").startswith("2 ")


def test_garbage_collector_skips_the_imported_modules() -> None:
    """The collector is enabled again after the imports, and the modules are frozen."""
    shown = "import gc; print(gc.isenabled(), gc.get_freeze_count() > 50_000)"
    assert _after_command("status", shown) == "True True\n"


def _after_command(words: str, program: str, **variables: str) -> str:
    """What `program` prints in the process of a command that has found no Postgres."""
    command = (
        "import sys; from click.testing import CliRunner; from tidemark.app.cli import main;"
        f"CliRunner().invoke(main, {words.split()!r}); {program}"
    )
    environment = child_environment({"TIDEMARK_POSTGRES_DSN": f"host=127.0.0.1 port={free_port()}"}) | variables
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_help_needs_no_spark() -> None:
    """Looking at the help, or producing a record, does not wait for the engine, nor the help for the settings."""
    program = (
        "import sys, tidemark.app.cli; early = {*sys.modules}; import tidemark.app.verbs.kafka_records;"
        "sys.exit(bool({'psycopg', 'structlog'} & early or 'pyspark' in sys.modules))"
    )
    assert _python("-c", program).returncode == 0


@pytest.mark.parametrize("verb", ["status", "gaps"])
def test_without_a_stack_a_verb_says_what_is_missing(verb: str, tmp_path: Path) -> None:
    """Nobody has set an address and no stack runs: no words of a database driver."""
    done = _tidemark(verb, TIDEMARK_HOME=str(tmp_path))
    assert done.returncode == 1
    where = "localhost:5432/tidemark"
    hint = "is `tidemark up` running? If not, start it or set TIDEMARK_POSTGRES_DSN"
    assert done.stderr == f"Error: Postgres does not answer at {where}: {hint}\n"


def test_a_stack_that_was_killed_leaves_no_riddle(tmp_path: Path) -> None:
    """Its `stack.env` is there, and nobody listens at the address in it."""
    port = free_port()
    (tmp_path / "stack.env").write_text(f"export TIDEMARK_POSTGRES_DSN=postgresql://127.0.0.1:{port}/tidemark\n")
    done = _tidemark("status", TIDEMARK_HOME=str(tmp_path))
    assert f"does not answer at 127.0.0.1:{port}/tidemark: is `tidemark up` running?" in done.stderr


def test_an_address_that_was_set_is_told_with_its_problem(tmp_path: Path) -> None:
    """Whoever set it does not ask for a local stack."""
    dsn = f"postgresql://127.0.0.1:{free_port()}/mine"
    done = _tidemark("status", TIDEMARK_HOME=str(tmp_path), TIDEMARK_POSTGRES_DSN=dsn)
    assert "tidemark up" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("home", [{}, {"HOME": ""}, {"HOME": "/proc/none"}])
def test_no_home_is_no_obstacle(home: dict[str, str], tmp_path: Path) -> None:
    """A user without a home directory gets a directory among the temporary files."""
    environment = {name: text for name, text in child_environment(home).items() if name != "HOME" or "HOME" in home}
    environment |= {"TMPDIR": str(tmp_path)}
    if os.geteuid() == 0 and shutil.which("setpriv"):  # a user whom nobody has listed
        user = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
        user += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    else:
        user = []
    command = [*user, "sh", "-c", 'exec "$0" "$@"', sys.executable, "-P", "-m", "tidemark", "config"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if user:
        assert f"{tmp_path}/tidemark-54321" in done.stdout


def test_a_shells_variables_do_not_lead_a_verb_away_from_the_stack(postgres: PostgresServer, tmp_path: Path) -> None:
    """`PG...` in the shell is for other servers than the one in `stack.env`; it counts for an address of one's own."""
    dsn = postgres.dsn("postgres")
    (tmp_path / "stack.env").write_text(f"export TIDEMARK_POSTGRES_DSN={dsn}\n")
    environment = child_environment({"TIDEMARK_HOME": str(tmp_path)})
    environment |= {"PGSSLMODE": "require", "PGHOSTADDR": "192.0.2.1", "PGSERVICE": "none"}

    def status(**more: str) -> str:
        command = [sys.executable, "-m", "tidemark", "status"]
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=60, check=False)
        return done.stderr

    assert "tidemark migrate" in status()  # it was reached, and has no schema
    assert "tidemark migrate" in status(TIDEMARK_POSTGRES_DSN=dsn)  # as in a shell that has sourced the file
    assert '"none" not found' in status(TIDEMARK_POSTGRES_DSN=f"{dsn}?application_name=mine")


ASKING = """
import sys
from urllib.request import urlopen
from tidemark.app.commands import load_settings
load_settings()
print(urlopen(sys.argv[1], timeout=10).read().decode())
"""


class _Here(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_verb_asks_this_machine_through_a_proxy(host: str) -> None:
    """The proxy is dead."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Here) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        environment = child_environment({}) | {"http_proxy": "http://127.0.0.1:9", "no_proxy": "intra"}
        command = [sys.executable, "-c", ASKING, f"http://{host}:{server.server_port}/"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        server.shutdown()
    assert (done.stdout, done.stderr) == ("here\n", "")
