"""All settings, from environment variables `TIDEMARK_...`.

Other modules get the settings from `load`. Only two read a variable themselves, because they have no settings:
`streaming.ingest.jit_cache` (TIDEMARK_HOME) and `app.output` (NO_COLOR).

The value of a setting comes from the first of these that is not empty: the variable; the file that `<variable>_FILE`
names (only secrets); `stack.env` of the local stack in TIDEMARK_HOME; the default.

With `stack.env`, commands in another terminal need no settings. A shell can also source the file. `settings_lines`
shows the effective settings with their sources, without secrets.
"""

import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_network
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from tidemark.app.connections import (
    PREFIX,
    AnyPort,
    Connections,
    HostPort,
    Maskable,
    NonEmpty,
    Positive,
    SecretStr,
    mask_passwords,
    mask_url,
    read_secret,
    require_both,
    variable,
)
from tidemark.common.environment import default_home, is_trusted
from tidemark.common.errors import BadSetting
from tidemark.streaming.values.limits import MAX_DAYS, POLICY_SETTINGS

_FOR_SHELLS = "# Only for shells: unset variables of other servers, bypass proxies, and extend PATH."
"""The line in `stack.env` that separates the settings from the commands that only a shell executes."""


def stack_env() -> Path:
    """The path of `stack.env`. The file exists only while a local stack runs."""
    return Path(os.environ.get(f"{PREFIX}HOME") or default_home()) / "stack.env"


def read_stack_env(path: Path | None = None) -> dict[str, str]:
    """Read the variables that `write_stack_env` got as `variables`: name -> value.

    Does not read the part of the file that is only for shells. Empty if the file is missing, unreadable, or in a
    temporary directory of another user.

    Args:
        path: the path of the file; None: `stack_env()`.
    """
    path = path or stack_env()
    words: list[list[str]] = []
    with suppress(OSError, ValueError):
        text = path.read_text() if is_trusted(path.parent) else ""
        words = [shlex.split(line) for line in text.partition(_FOR_SHELLS)[0].splitlines()]
    pairs = [line[1].partition("=") for line in words if len(line) == 2 and line[0] == "export"]
    return {name: value for name, _, value in pairs}


def write_stack_env(path: Path, variables: Mapping[str, str], unset: list[str], programs: Sequence[Path]) -> None:
    """Write `stack.env`. Only its owner may read the file, because it contains the password of Postgres.

    Args:
        path: the file.
        variables: the variables to export: name -> value.
        unset: the names of variables that the shell must unset.
        programs: folders that the shell must add to the end of PATH, so that the user's own programs come first.
    """
    path.touch(mode=0o600)
    lines = [f"export {name}={shlex.quote(text)}" for name, text in variables.items()]
    lines += [_FOR_SHELLS, f"unset {' '.join(unset)}"]
    lines += [f'export {name}="${{{name}:+${name},}}127.0.0.1,localhost"' for name in ("no_proxy", "NO_PROXY")]
    for folder in map(str, programs):
        lines.append(f'case ":$PATH:" in *:{shlex.quote(folder)}:*) ;; *) PATH="$PATH":{shlex.quote(folder)} ;; esac')
    path.write_text("\n".join(lines) + "\n")


def _check_proxies(text: str) -> None:
    for proxy in _split_list(text):
        try:
            proxy == "*" or ip_network(proxy)
        except ValueError:
            raise ValueError(
                "expected `*`, or addresses or networks separated by commas, for example 10.0.0.7,10.0.0.0/8"
            ) from None


ServerName = Annotated[str, Meta(pattern=r"^\S{1,255}\Z", description="1 to 255 characters without white space")]


class SidecarSettings(Connections, frozen=True, kw_only=True):
    sidecar_host: Annotated[NonEmpty, "Address that the sidecar listens on."] = "127.0.0.1"
    sidecar_port: Annotated[AnyPort, "Port of the sidecar; 0 = any free port."] = 9480
    sidecar_tokens_file: Annotated[
        Path | None, "File of bearer tokens, one a line; read again when it changes. Default: every client may read."
    ] = None
    sidecar_certificate_file: Annotated[
        Path | None, "PEM file of the certificate with its chain. If set, HTTP and the line protocol use TLS."
    ] = None
    sidecar_key_file: Annotated[
        Path | None, "PEM file of the certificate's key. Both files are read again when they change."
    ] = None
    sidecar_ca_file: Annotated[
        Path | None, "PEM file of the authority that signed the certificate. If set, `tidemark listen` uses TLS."
    ] = None
    sidecar_cors_origins: Annotated[str, "Web sites whose scripts may read the sidecar: https://host[,...]."] = ""
    sidecar_allowed_hosts: Annotated[
        str, "Accepted `Host` names, comma-separated. Default: any; on a loopback address, only loopback names."
    ] = ""
    sidecar_trusted_proxies: Annotated[
        str,
        _check_proxies,
        "Addresses or networks, comma-separated, of proxies whose X-Forwarded-For is trusted; * = any.",
    ] = ""
    sidecar_max_connections: Annotated[Positive, "Maximum of open HTTP connections to the sidecar."] = 5000
    sidecar_max_open_requests: Annotated[Positive, "Maximum of waiting requests and open event streams."] = 2500
    sidecar_banner: Annotated[
        str, "Banner text on the live page. On a phone, only its first line is shown unfolded."
    ] = ""
    sidecar_max_wait_seconds: Annotated[float, Meta(gt=0, le=3600), "Maximum seconds that a request may wait."] = 60.0

    lines_listen: Annotated[HostPort, "Address of the sidecar's line protocol, host:port; port 0 = any free port."] = (
        "127.0.0.1:9481"
    )
    lines_max_connections: Annotated[Positive, "Maximum of connected clients of the line protocol."] = 1000
    lines_server_name: Annotated[
        ServerName,
        "Server name in the first line of the line protocol; sidecars with the same name relay commands.",
    ] = "tidemark"
    lines_redis_channel: Annotated[
        ServerName | None,
        "Redis channel on which sidecars also announce positions. In database n (not 0), /n is appended"
        " to the name. Default: positions are announced only over TCP.",
    ] = None
    lines_row_buffer_mib: Annotated[
        Positive, "MiB of rows that may wait for positions. Beyond that, clients of the line protocol fetch rows."
    ] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_both(self, "sidecar_certificate_file", "sidecar_key_file")

    @property
    def sidecar_origins(self) -> list[str]:
        return _split_list(self.sidecar_cors_origins)

    @property
    def sidecar_proxies(self) -> list[str]:
        return _split_list(self.sidecar_trusted_proxies)

    @property
    def sidecar_hosts(self) -> list[str]:
        return _split_list(self.sidecar_allowed_hosts)


def _split_list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


# Variables in `stack.env` that only users and their programs read.
USER_VARIABLES = {f"{PREFIX}METRICS_URL", f"{PREFIX}SIDECAR_URL"}

StoreUri = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9+.-]*:/.+", description="a URI such as s3a://bucket/tidemark")]
MemorySize = Annotated[
    str, Meta(pattern=r"^[1-9][0-9]*[kmgt]\Z", description="an integer with the unit k, m, g or t, such as 512m or 2g")
]
Days = Annotated[int, Meta(ge=1, le=MAX_DAYS)]


class Settings(SidecarSettings, frozen=True, kw_only=True):
    """The effective settings. `load` creates them."""

    home: Annotated[Path, "Directory of the jars and of the local stack's data."]
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "Minimum level of logged lines."] = "info"
    log_format: Annotated[Literal["console", "json"], "Format of log lines: text for people, or JSON."] = "console"
    no_color: Annotated[str, "If set to any text, no colours on a terminal."] = ""

    shards: Annotated[
        int, Meta(ge=1, le=4096), "Number of groups over which streams are distributed. A change needs --accept shards."
    ] = 16
    checkpoint: Annotated[Path, "Directory of Spark's checkpoints. Each query has a folder in it until the query ends."]
    checkpoint_store: Annotated[
        StoreUri | None,
        "URI of a store that driver and executors reach (s3a://bucket/tidemark); one for each database.",
    ] = None
    spark_master: Annotated[
        str,
        Meta(
            pattern=r"^(local(\[(\*|[1-9][0-9]*)\])?|spark://.+|k8s://.+)\Z",
            description="local, local[N], local[*], spark://host:port or k8s://https://host:port",
        ),
        "Where Spark runs: local (all available cores), local[N], spark://host:7077, k8s://https://host.",
    ] = "local"
    spark_driver_memory: Annotated[MemorySize, "Heap of Spark's driver, such as 512m or 2g."] = "1g"
    spark_driver_host: Annotated[
        NonEmpty | None,
        "Host name at which executors reach this process. Default: the address on the route to the master.",
    ] = None
    spark_driver_port: Annotated[AnyPort, "Port at which executors reach the driver; 0 = any free port."] = 0
    spark_block_manager_port: Annotated[AnyPort, "Port for data between Spark's processes; 0 = any free port."] = 0
    spark_executors: Annotated[
        Positive, "Executors on a cluster; the minimum if TIDEMARK_SPARK_EXECUTORS_MAX is set."
    ] = 2
    spark_executors_max: Annotated[
        Positive | None, "Maximum of executors, allocated by load; needs TIDEMARK_CHECKPOINT_STORE."
    ] = None
    spark_executor_cores: Annotated[Positive, "Cores of each executor."] = 1
    spark_executor_memory: Annotated[MemorySize, "Heap of each executor."] = "1g"
    spark_executor_python: Annotated[
        NonEmpty | None,
        "Python of the executors, with Tidemark's dependencies. Default: that of this process.",
    ] = None
    spark_kubernetes_image: Annotated[NonEmpty | None, "Image of executor pods."] = None
    spark_kubernetes_namespace: Annotated[NonEmpty | None, "Namespace of executor pods."] = None
    spark_kubernetes_service_account: Annotated[
        NonEmpty | None, "Service account of executor pods; it needs no rights."
    ] = None
    spark_kubernetes_driver_pod: Annotated[
        NonEmpty | None, "Name of the pod of this process. Executor pods end when it ends."
    ] = None
    spark_kubernetes_executor_template: Annotated[Path | None, "YAML file with the template of executor pods."] = None
    spark_conf_file: Annotated[Path | None, "Properties file with settings of Spark. They override Tidemark's."] = None
    spark_jars: Annotated[Path | None, "Directory of the jars that TIDEMARK_CHECKPOINT_STORE needs."] = None
    max_records_per_batch: Annotated[Positive, "Maximum of Kafka records that one batch reads."] = 4_000_000
    batch_cpu_share: Annotated[
        float,
        Meta(gt=0, le=1000),
        "Cores that batches of fewer than 20,000 records may use. It delays no record by more than 0.6 s.",
    ] = 0.35
    java_home: Annotated[Path | None, "Directory of the Java installation. Default: the first java on the PATH."] = None

    owner: Annotated[NonEmpty, "Name of this process in the lease. It is only shown."]
    lease_seconds: Annotated[
        int,
        Meta(ge=3, le=600),
        "Seconds after which a lease expires if it is not renewed. Another pipeline then takes over.",
    ] = 15
    metrics_host: Annotated[str, "Address that the pipeline's /metrics listens on."] = "127.0.0.1"
    metrics_port: Annotated[AnyPort, "Port of the pipeline's /metrics; 0 = any free port."] = 9464
    metrics_max_streams: Annotated[
        int, Meta(ge=0), "Streams with their own series in the metrics. The others are aggregated in one."
    ] = 1000
    metrics_max_writers: Annotated[
        int, Meta(ge=0), "Writers, of all streams, with their own series. The others are aggregated in one."
    ] = 5000

    history_days: Annotated[Days, "Days that Postgres keeps the history of advances and of gaps."] = 7
    audit_days: Annotated[Days, "Days that Postgres keeps operator overrides and late completions."] = 400
    redis_advances_max: Annotated[Positive, "Maximum of advances of each stream that Redis keeps."] = 10_000
    pending_bound: Annotated[
        Positive, "Maximum of completed intervals above a gap, for one writer. Further edges are deferred."
    ] = 10_000
    completed_bound: Annotated[
        Positive, "Maximum of completed intervals above a linear position. Beyond it, the position moves later."
    ] = 10_000
    retirement_days: Annotated[Days, "Days after which a retired writer is removed from the state."] = 7
    retired_bound: Annotated[Positive, "Maximum of retired writers of one stream that are stored."] = 10_000
    alert_gap_seconds: Annotated[
        Positive, "Age of a gap in seconds, and seconds for which a linear position is blocked, that cause an alert."
    ] = 120
    silent_seconds: Annotated[Positive, "Seconds without a record after which a writer counts as silent."] = 60

    heartbeat_seconds: Annotated[
        int,
        Meta(ge=0, le=86_400),
        "Seconds in which a relay or bridge sends at least one record of each stream; 0 = no heartbeat.",
    ] = 30

    up_kafka_port: Annotated[AnyPort, "`tidemark up`: port of Kafka; 0 = any free port."] = 19092
    up_postgres_port: Annotated[AnyPort, "`tidemark up`: port of Postgres; 0 = any free port."] = 15432
    up_redis_port: Annotated[AnyPort, "`tidemark up`: port of Redis; 0 = any free port."] = 16379
    up_metrics_port: Annotated[AnyPort, "`tidemark up`: port of the metrics; 0 = any free port."] = 19464
    up_sidecar_port: Annotated[AnyPort, "`tidemark up`: port of the sidecar; 0 = any free port."] = 19480
    up_lines_port: Annotated[AnyPort, "`tidemark up`: port of the line protocol; 0 = any free port."] = 19481

    def __post_init__(self) -> None:
        super().__post_init__()
        minimum, maximum = self.spark_executors, self.spark_executors_max
        setting = f"{variable('spark_executors_max')}={maximum}"
        if maximum is not None and self.checkpoint_store is None:
            raise ValueError(
                f"{setting} needs {variable('checkpoint_store')}: otherwise states are lost with removed executors"
            )
        if maximum is not None and maximum < minimum:
            raise ValueError(f"{setting} is below {variable('spark_executors')}={minimum}")

    @property
    def policy_defaults(self) -> dict[str, int]:
        """The settings of streams without a policy: name of the policy setting -> value."""
        same_name = {name: getattr(self, name) for name in POLICY_SETTINGS if name in FIELDS}
        return {**same_name, "gap_seconds": self.alert_gap_seconds}

    @property
    def metrics_url(self) -> str:
        host = {"::": "[::1]"}.get(self.metrics_host, self.metrics_host)
        return f"http://{host}:{self.metrics_port}/metrics"


class SettingField(msgspec.Struct, frozen=True):
    """A setting in `Settings`.

    Args:
        type: the annotation with the limits.
        kind: the annotation without limits and without `| None`: a class or a `Literal`.
        metadata: the description, `msgspec.Meta` with limits, functions that check a value, and `Maskable`.
        default: None if the setting has none, or if `load` computes it.
    """

    name: str
    type: Any
    kind: Any
    metadata: list[Any]
    default: Any

    @property
    def description(self) -> str:
        return next(item for item in self.metadata if isinstance(item, str))

    @property
    def is_secret(self) -> bool:
        return self.kind is SecretStr

    @property
    def allowed(self) -> str:
        """The allowed values, as the object of a sentence."""
        if get_origin(self.kind) is Literal:
            *others, last = map(repr, get_args(self.kind))
            return f"{', '.join(others)} or {last}"
        limits = [item for item in self.metadata if isinstance(item, Meta)]
        if patterns := [item.description for item in limits if item.pattern is not None]:
            return str(patterns[0])
        texts = []
        for words, bound in ((">", "gt"), (">=", "ge"), ("<=", "le")):
            texts += [f"{words} {value}" for item in limits if (value := getattr(item, bound)) is not None]
        return f"{_NOUNS.get(self.kind, 'text')} {' and '.join(texts)}".rstrip()

    def convert(self, value: Any) -> Any:
        """The valid value of the setting, from the text of a variable or from a value of its type.

        Raises:
            ValueError: `value` is not allowed. The text of the error names the allowed values.
        """
        try:
            if isinstance(value, str) and self.kind in _NOUNS:
                value = _parse(value, self.kind)
            valid = msgspec.convert(value, self.type, dec_hook=_construct)
        except ValueError:
            raise ValueError(f"expected {self.allowed}") from None
        if isinstance(valid, Path) and str(valid).startswith("~"):
            raise ValueError("only a shell replaces ~; write the path of the home directory")
        for check in self.metadata:
            if callable(check) and valid is not None:
                check(valid)
        return valid


_NOUNS: Final = {bool: "true or false", int: "an integer", float: "a number"}
_BOOLEANS: Final = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}


def _parse(text: str, kind: type) -> Any:
    """The boolean or number in `text`. Raises `ValueError` if `text` has another form."""
    if kind is bool:
        return _BOOLEANS.get(text.lower(), text)
    if not re.fullmatch(r"\s*[-+.\w]+\s*", text, re.ASCII):
        raise ValueError
    return kind(re.sub(r"\.0+\s*\Z", "", text) if kind is int else text)


def _construct(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else kind(value)


def _field(info: msgspec.structs.FieldInfo) -> SettingField:
    kind, metadata = info.type, list[Any]()
    while get_origin(kind) in (Annotated, Union, UnionType):
        metadata += getattr(kind, "__metadata__", ())
        kind = get_args(kind)[0]  # the other member of each union is None
    default = None if info.default is msgspec.NODEFAULT else info.default
    return SettingField(info.name, info.type, kind, metadata, default)


FIELDS: Final = {info.name: _field(info) for info in msgspec.structs.fields(Settings)}


def load(**given: Any) -> Settings:
    """Load the settings of this process. An empty variable counts as unset.

    Args:
        given: values of settings that take precedence over all sources.

    Raises:
        BadSetting: about the first wrong setting.
    """
    stack = read_stack_env()
    values: dict[str, Any] = {name: text for name in FIELDS if (text := _text_of(name, stack))} | given
    values |= {name: _valid(field, values[name]) for name, field in FIELDS.items() if name in values}
    values["home"] = values.get("home", default_home()).absolute()
    values = {"checkpoint": values["home"] / "checkpoint", "owner": f"{socket.gethostname()}:{os.getpid()}"} | values
    try:
        return Settings(**values)
    except ValueError as error:  # about several settings; its text names them
        raise BadSetting("settings", str(error)) from None


def _valid(field: SettingField, value: Any) -> Any:
    try:
        return field.convert(value)
    except ValueError as error:
        shown = "the value" if field.is_secret else mask_passwords(repr(value))
        raise BadSetting(variable_of(field.name), f"{shown} is not allowed: {error} ({field.description})") from None


def _secret_of_file(field: SettingField) -> str | None:
    """Read a secret from the file that the variable `TIDEMARK_..._FILE` names. None if the setting is no secret, or if
    the variable is not set. Container platforms provide secrets as files.

    Raises:
        BadSetting: the file cannot be read, or the variable is also set directly.
    """
    direct = variable_of(field.name)
    if not field.is_secret or not (path := os.environ.get(f"{direct}_FILE")):
        return None
    if os.environ.get(direct):
        raise BadSetting(f"{direct}_FILE", f"{direct} is set too; unset one of them")
    try:
        return read_secret(Path(path))
    except OSError as error:
        raise BadSetting(f"{direct}_FILE", f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:  # the original error has the content
        raise BadSetting(f"{direct}_FILE", f"cannot read {path}: the file is not text in UTF-8") from None


def variable_of(name: str) -> str:
    """The name of the environment variable of the setting `name`."""
    return {"no_color": "NO_COLOR", "java_home": "JAVA_HOME"}.get(name) or variable(name)


def is_set(name: str) -> bool:
    """Whether a variable, a secret file or `stack.env` sets the setting `name`."""
    return bool(_text_of(name, read_stack_env()))


def _text_of(name: str, stack: Mapping[str, str]) -> str | None:
    return _secret_of_file(FIELDS[name]) or os.environ.get(variable_of(name)) or stack.get(variable(name))


def origin_of(name: str, stack: Mapping[str, str] | None = None) -> str:
    """The source of the effective value of the setting `name`: `environment`, the path of a file, or `default`.

    Args:
        stack: the result of `read_stack_env`; None: this function reads the file.
    """
    if os.environ.get(variable_of(name)):
        return "environment"
    if FIELDS[name].is_secret and (path := os.environ.get(f"{variable_of(name)}_FILE")):
        return path
    if (read_stack_env() if stack is None else stack).get(variable(name)):
        return str(stack_env())
    return "default"


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """A setting: its environment variable, its value with masked secrets (None: not set), and the value's source."""

    name: str
    value: str | None
    source: str


@dataclass(frozen=True, slots=True)
class UnknownVariable:
    """A `TIDEMARK_...` variable that is not a setting, and the setting with the most similar name, if any."""

    name: str
    similar: str | None


def effective_settings(settings: Settings) -> list[EffectiveSetting]:
    stack = read_stack_env()
    return [
        EffectiveSetting(variable_of(name), _shown_value(name, getattr(settings, name)), origin_of(name, stack))
        for name in FIELDS
    ]


def unknown_settings() -> list[UnknownVariable]:
    """The `TIDEMARK_...` variables in the environment that are not settings: misspelled, or for another program."""
    similar = {variable_of(name).removeprefix(PREFIX): variable_of(name) for name in FIELDS}
    known = {*USER_VARIABLES, *similar.values()}
    known |= {f"{variable_of(name)}_FILE" for name, field in FIELDS.items() if field.is_secret}
    return [
        UnknownVariable(name, next(map(similar.get, get_close_matches(name.removeprefix(PREFIX), similar, n=1)), None))
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    ]


def settings_lines(settings: Settings) -> Iterator[str]:
    """Yield one line of text for each setting, then one for each unknown `TIDEMARK_...` variable. Secrets are
    masked."""
    rows = [(row.name, "-" if row.value is None else row.value, row.source) for row in effective_settings(settings)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        yield f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}"
    for unknown in unknown_settings():
        hint = "" if unknown.similar is None else f"; did you mean {unknown.similar}?"
        yield f"{unknown.name} is not a setting{hint}"


def _shown_value(name: str, value: Any) -> str | None:
    """The value of the setting `name` as text with masked secrets; None if the setting is not set."""
    match value:
        case None:
            return None
        case SecretStr():
            shown = [item for item in FIELDS[name].metadata if isinstance(item, Maskable)]
            if not shown:
                return "***"
            return (mask_url if shown[0].is_web_url else mask_passwords)(value.get_secret_value())
        case _:
            return mask_passwords(str(value)).replace("\n", "\\n")
