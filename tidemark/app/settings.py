"""All settings, from environment variables `TIDEMARK_...`.

Other modules get the settings from `load`. Only two read a variable themselves, because they have no settings:
`streaming.ingest.jit_cache` (TIDEMARK_HOME) and `app.output` (NO_COLOR).

The value of a setting comes from the first of these that is not empty: the variable; the file that `<variable>_FILE`
names (only secrets); `stack.env` of the local stack in TIDEMARK_HOME; the default.

With `stack.env`, commands in another terminal need no settings. A shell can also source the file. `settings_lines`
shows the effective settings with their sources, without secrets.
"""

import os
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo

from tidemark.app.connections import (
    PREFIX,
    AnyPort,
    Connections,
    HostPort,
    Maskable,
    Positive,
    mask_passwords,
    mask_url,
    require_both,
    variable,
)
from tidemark.common.environment import default_home, is_trusted
from tidemark.common.errors import BadSetting
from tidemark.streaming.values.limits import POLICY_SETTINGS

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


def _check_proxies(text: str) -> str:
    for proxy in _split_list(text):
        try:
            proxy == "*" or ip_network(proxy)
        except ValueError:
            raise ValueError(
                "expected `*`, or addresses or networks separated by commas, for example 10.0.0.7,10.0.0.0/8"
            ) from None
    return text


TrustedProxies = Annotated[str, AfterValidator(_check_proxies)]


class SidecarSettings(BaseModel):
    model_config = ConfigDict(defer_build=True)  # only the subclass `Settings` is used

    sidecar_host: str = Field("127.0.0.1", min_length=1, description="Address that the sidecar listens on.")
    sidecar_port: AnyPort = Field(9480, description="Port of the sidecar; 0 = any free port.")
    sidecar_tokens_file: Path | None = Field(
        None,
        description="File of bearer tokens, one a line; read again when it changes. Default: every client may read.",
    )
    sidecar_certificate_file: Path | None = Field(
        None, description="PEM file of the certificate with its chain. If set, HTTP and the line protocol use TLS."
    )
    sidecar_key_file: Path | None = Field(
        None, description="PEM file of the certificate's key. Both files are read again when they change."
    )
    sidecar_ca_file: Path | None = Field(
        None, description="PEM file of the authority that signed the certificate. If set, `tidemark listen` uses TLS."
    )
    sidecar_cors_origins: str = Field(
        "", description="Web sites whose scripts may read the sidecar: https://host[,...]."
    )
    sidecar_allowed_hosts: str = Field(
        "",
        description="Accepted `Host` names, comma-separated. Default: any; on a loopback address, only loopback names.",
    )
    sidecar_trusted_proxies: TrustedProxies = Field(
        "",
        description="Addresses or networks, comma-separated, of proxies whose X-Forwarded-For is trusted; * = any.",
    )
    sidecar_max_connections: Positive = Field(5000, description="Maximum of open HTTP connections to the sidecar.")
    sidecar_max_open_requests: Positive = Field(2500, description="Maximum of waiting requests and open event streams.")
    sidecar_banner: str = Field(
        "", description="Banner text on the live page. On a phone, only its first line is shown unfolded."
    )
    sidecar_max_wait_seconds: Annotated[float, Field(gt=0, le=3600)] = Field(
        60.0, description="Maximum seconds that a request may wait."
    )

    lines_listen: HostPort = Field(
        "127.0.0.1:9481", description="Address of the sidecar's line protocol, host:port; port 0 = any free port."
    )
    lines_max_connections: Positive = Field(1000, description="Maximum of connected clients of the line protocol.")
    lines_server_name: Annotated[str, Field(pattern=r"^\S{1,255}$")] = Field(
        "tidemark",
        description="Server name in the first line of the line protocol; sidecars with the same name relay commands.",
    )
    lines_redis_channel: Annotated[str | None, Field(pattern=r"^\S{1,255}$")] = Field(
        None,
        description="Redis channel on which sidecars also announce positions. In database n (not 0), /n is appended"
        " to the name. Default: positions are announced only over TCP.",
    )
    lines_row_buffer_mib: Positive = Field(
        64, description="MiB of rows that may wait for positions. Beyond that, clients of the line protocol fetch rows."
    )

    @model_validator(mode="after")
    def _sidecar_certificate_has_its_key(self) -> Self:
        require_both(self, "sidecar_certificate_file", "sidecar_key_file")
        return self

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

MemorySize = Annotated[str, Field(pattern=r"^[1-9]\d*[kmgt]$")]


class Settings(SidecarSettings, Connections):
    """The effective settings. `load` creates them."""

    model_config = ConfigDict(extra="ignore", frozen=True, validate_default=True, defer_build=False)

    home: Annotated[Path, AfterValidator(Path.absolute)] = Field(
        default_factory=default_home, description="Directory of the jars and of the local stack's data."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum level of logged lines."
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="Format of log lines: text for people, or JSON."
    )
    no_color: str = Field("", validation_alias="NO_COLOR", description="If set to any text, no colours on a terminal.")

    shards: Annotated[int, Field(ge=1, le=4096)] = Field(
        16, description="Number of groups over which streams are distributed. A change needs --accept shards."
    )
    checkpoint: Path = Field(
        default_factory=lambda known: known["home"] / "checkpoint",
        description="Directory of Spark's checkpoints. Each query has a folder in it until the query ends.",
    )
    checkpoint_store: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.-]*:/.+",
        description="URI of a store that driver and executors reach (s3a://bucket/tidemark); one for each database.",
    )
    spark_master: str = Field(
        "local",
        pattern=r"^(local(\[(\*|[1-9]\d*)\])?|spark://.+|k8s://.+)$",
        description="Where Spark runs: local (all available cores), local[N], spark://host:7077, k8s://https://host.",
    )
    spark_driver_memory: MemorySize = Field("1g", description="Heap of Spark's driver, such as 512m or 2g.")
    spark_driver_host: str | None = Field(
        None,
        min_length=1,
        description="Host name at which executors reach this process. Default: the address on the route to the master.",
    )
    spark_driver_port: AnyPort = Field(0, description="Port at which executors reach the driver; 0 = any free port.")
    spark_block_manager_port: AnyPort = Field(
        0, description="Port for data between Spark's processes; 0 = any free port."
    )
    spark_executors: Positive = Field(
        2, description="Executors on a cluster; the minimum if TIDEMARK_SPARK_EXECUTORS_MAX is set."
    )
    spark_executors_max: Positive | None = Field(
        None, description="Maximum of executors, allocated by load; needs TIDEMARK_CHECKPOINT_STORE."
    )
    spark_executor_cores: Positive = Field(1, description="Cores of each executor.")
    spark_executor_memory: MemorySize = Field("1g", description="Heap of each executor.")
    spark_executor_python: str | None = Field(
        None,
        min_length=1,
        description="Python of the executors, with Tidemark's dependencies. Default: that of this process.",
    )
    spark_kubernetes_image: str | None = Field(None, min_length=1, description="Image of executor pods.")
    spark_kubernetes_namespace: str | None = Field(None, min_length=1, description="Namespace of executor pods.")
    spark_kubernetes_service_account: str | None = Field(
        None, min_length=1, description="Service account of executor pods; it needs no rights."
    )
    spark_kubernetes_driver_pod: str | None = Field(
        None, min_length=1, description="Name of the pod of this process. Executor pods end when it ends."
    )
    spark_kubernetes_executor_template: Path | None = Field(
        None, description="YAML file with the template of executor pods."
    )
    spark_conf_file: Path | None = Field(
        None, description="Properties file with settings of Spark. They override Tidemark's."
    )
    spark_jars: Path | None = Field(None, description="Directory of the jars that TIDEMARK_CHECKPOINT_STORE needs.")
    max_records_per_batch: Positive = Field(4_000_000, description="Maximum of Kafka records that one batch reads.")
    batch_cpu_share: Annotated[float, Field(gt=0, le=1000)] = Field(
        0.35,
        description="Cores that batches of fewer than 20,000 records may use. It delays no record by more than 0.6 s.",
    )
    java_home: Path | None = Field(
        None,
        validation_alias="JAVA_HOME",
        description="Directory of the Java installation. Default: the first java on the PATH.",
    )

    owner: str = Field(
        default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}",
        min_length=1,
        description="Name of this process in the lease. It is only shown.",
    )
    lease_seconds: Annotated[int, Field(ge=3, le=600)] = Field(
        15, description="Seconds after which a lease expires if it is not renewed. Another pipeline then takes over."
    )
    metrics_host: str = Field("127.0.0.1", description="Address that the pipeline's /metrics listens on.")
    metrics_port: AnyPort = Field(9464, description="Port of the pipeline's /metrics; 0 = any free port.")
    metrics_max_streams: int = Field(
        1000, ge=0, description="Streams with their own series in the metrics. The others are aggregated in one."
    )
    metrics_max_writers: int = Field(
        5000, ge=0, description="Writers, of all streams, with their own series. The others are aggregated in one."
    )

    history_days: Positive = Field(7, description="Days that Postgres keeps the history of advances and of gaps.")
    audit_days: Positive = Field(400, description="Days that Postgres keeps operator overrides and late completions.")
    redis_advances_max: Positive = Field(10_000, description="Maximum of advances of each stream that Redis keeps.")
    pending_bound: Positive = Field(
        10_000,
        description="Maximum of completed intervals above a gap, for one writer. Further edges are deferred.",
    )
    completed_bound: Positive = Field(
        10_000,
        description="Maximum of completed intervals above a linear position. Beyond it, the position moves later.",
    )
    retirement_days: Positive = Field(7, description="Days after which a retired writer is removed from the state.")
    retired_bound: Positive = Field(10_000, description="Maximum of retired writers of one stream that are stored.")
    alert_gap_seconds: Positive = Field(
        120,
        description="Age of a gap in seconds, and seconds for which a linear position is blocked, that cause an alert.",
    )
    silent_seconds: Positive = Field(60, description="Seconds without a record after which a writer counts as silent.")

    heartbeat_seconds: Annotated[int, Field(ge=0, le=86_400)] = Field(
        30,
        description="Seconds in which a relay or bridge sends at least one record of each stream; 0 = no heartbeat.",
    )

    up_kafka_port: AnyPort = Field(19092, description="`tidemark up`: port of Kafka; 0 = any free port.")
    up_postgres_port: AnyPort = Field(15432, description="`tidemark up`: port of Postgres; 0 = any free port.")
    up_redis_port: AnyPort = Field(16379, description="`tidemark up`: port of Redis; 0 = any free port.")
    up_metrics_port: AnyPort = Field(19464, description="`tidemark up`: port of the metrics; 0 = any free port.")
    up_sidecar_port: AnyPort = Field(19480, description="`tidemark up`: port of the sidecar; 0 = any free port.")
    up_lines_port: AnyPort = Field(19481, description="`tidemark up`: port of the line protocol; 0 = any free port.")

    @model_validator(mode="after")
    def _dynamic_executors_need_a_store(self) -> Self:
        minimum, maximum = self.spark_executors, self.spark_executors_max
        setting = f"{variable('spark_executors_max')}={maximum}"
        if maximum is not None and self.checkpoint_store is None:
            raise ValueError(
                f"{setting} needs {variable('checkpoint_store')}: otherwise states are lost with removed executors"
            )
        if maximum is not None and maximum < minimum:
            raise ValueError(f"{setting} is below {variable('spark_executors')}={minimum}")
        return self

    def secret(self, name: str) -> str | None:
        """The current value of the secret setting `name`; None if the setting is not set.

        If the secret is in a file, reads the file at each call. If the file cannot be read, returns the value at the
        time when the settings were loaded.
        """
        path = os.environ.get(f"{variable_of(name)}_FILE")
        with suppress(OSError):
            if path:
                return _read_secret(Path(path))
        known: SecretStr | None = getattr(self, name)
        return None if known is None else known.get_secret_value()

    @property
    def policy_defaults(self) -> dict[str, int]:
        """The settings of streams without a policy: name of the policy setting -> value."""
        same_name = {name: getattr(self, name) for name in POLICY_SETTINGS if name in Settings.model_fields}
        return {**same_name, "gap_seconds": self.alert_gap_seconds}

    @property
    def metrics_url(self) -> str:
        host = {"::": "[::1]"}.get(self.metrics_host, self.metrics_host)
        return f"http://{host}:{self.metrics_port}/metrics"

    @model_validator(mode="before")
    @classmethod
    def _from_environment(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Add the values from secret files, the environment and `stack.env` to `given`. Values in `given` take
        precedence. An empty variable counts as unset."""
        stack = read_stack_env()
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            text = _secret_of_file(name, field) or os.environ.get(variable_of(name)) or stack.get(variable(name))
            if text:
                values[str(field.validation_alias or name)] = text
        return values | given


def _secret_of_file(name: str, field: FieldInfo) -> str | None:
    """Read a secret from the file that the variable `TIDEMARK_..._FILE` names. None if the setting is no secret, or if
    the variable is not set. Container platforms provide secrets as files.

    Raises:
        BadSetting: the file cannot be read, or the variable is also set directly.
    """
    variable = f"{variable_of(name)}_FILE"
    if not is_secret(field) or not (path := os.environ.get(variable)):
        return None
    if os.environ.get(variable_of(name)):
        raise BadSetting(variable, f"{variable_of(name)} is set too; unset one of them")
    try:
        return _read_secret(Path(path))
    except OSError as error:
        raise BadSetting(variable, f"cannot read {path}: {error.strerror}") from None


def _read_secret(secret: Path) -> str:
    return secret.read_text().rstrip("\r\n")


def load() -> Settings:
    """Load the settings of this process. Raises `BadSetting` about the first wrong setting."""
    try:
        return Settings()
    except ValidationError as error:
        raise _bad_setting(error) from None


def _bad_setting(error: ValidationError) -> BadSetting:
    first = error.errors()[0]
    problem = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # an error about several settings; its text names them
        return BadSetting("settings", problem)
    name = str(first["loc"][0])
    field = Settings.model_fields.get(name) or Settings.model_fields["java_home"]
    value = "the value" if is_secret(field) else mask_passwords(repr(first["input"]))
    return BadSetting(
        variable_of(name), f"{value} is not allowed: {problem[0].lower()}{problem[1:]} ({field.description})"
    )


def variable_of(name: str) -> str:
    """The name of the environment variable of the setting `name`."""
    alias = Settings.model_fields[name].validation_alias if name in Settings.model_fields else name
    return str(alias or variable(name))


def is_secret(field: FieldInfo) -> bool:
    return SecretStr in (field.annotation, *get_args(field.annotation))


def origin_of(name: str) -> str:
    """The source of the effective value of the setting `name`: `environment`, the path of a file, or `default`."""
    variable = variable_of(name)
    if os.environ.get(variable):
        return "environment"
    if is_secret(Settings.model_fields[name]) and (path := os.environ.get(f"{variable}_FILE")):
        return path
    if variable in read_stack_env():
        return str(stack_env())
    return "default"


def unknown_variables() -> list[str]:
    """The `TIDEMARK_...` variables in the environment that are not settings: misspelled, or for another program."""
    known = USER_VARIABLES | {variable_of(name) for name in Settings.model_fields}
    known |= {f"{variable_of(name)}_FILE" for name, field in Settings.model_fields.items() if is_secret(field)}
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)


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
    return [
        EffectiveSetting(variable_of(name), _shown_value(name, getattr(settings, name)), origin_of(name))
        for name in _setting_names()
    ]


def unknown_settings() -> list[UnknownVariable]:
    known = [variable_of(name) for name in _setting_names()]
    return [
        UnknownVariable(name, next(iter(get_close_matches(name, known, n=1)), None)) for name in unknown_variables()
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


def _setting_names() -> list[str]:
    return list(Settings.model_fields)


def _shown_value(name: str, value: Any) -> str | None:
    """The value of the setting `name` as text with masked secrets; None if the setting is not set."""
    match value:
        case None:
            return None
        case SecretStr():
            shown = [
                constraint for constraint in Settings.model_fields[name].metadata if isinstance(constraint, Maskable)
            ]
            if not shown:
                return "***"
            return (mask_url if shown[0].is_web_url else mask_passwords)(value.get_secret_value())
        case _:
            return mask_passwords(str(value)).replace("\n", "\\n")
