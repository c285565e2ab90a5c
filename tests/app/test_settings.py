import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tidemark.app.settings import FIELDS, is_set, load, settings_lines, variable_of
from tidemark.common.environment import child_environment
from tidemark.common.errors import BadSetting
from tidemark.streaming.values.limits import POLICY_SETTINGS


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the user's own, and a home in which no stack has ever run."""
    for name in FIELDS:
        monkeypatch.delenv(variable_of(name), raising=False)
    monkeypatch.setenv("TIDEMARK_HOME", str(tmp_path))


SetEnv = Callable[[str, str], None]


@pytest.fixture
def setenv(monkeypatch: pytest.MonkeyPatch) -> SetEnv:
    return lambda name, value: monkeypatch.setenv(f"TIDEMARK_{name}", value)


def test_defaults_hang_together(tmp_path: Path) -> None:
    """With nothing but a home set, everything has a value, and what belongs to the home lies in it."""
    settings = load()
    assert settings.checkpoint == tmp_path / "checkpoint"
    assert settings.kafka.bootstrap == "localhost:9092"


def test_settings_are_the_defaults_of_policies(setenv: SetEnv) -> None:
    """Each policy setting that has a default takes it from a setting of the environment."""
    setenv("ALERT_GAP_SECONDS", "77")
    setenv("SILENT_SECONDS", "9")
    defaults = load().policy_defaults
    assert (defaults["gap_seconds"], defaults["silent_seconds"]) == (77, 9)
    assert set(defaults) == {name for name, setting in POLICY_SETTINGS.items() if setting.default is not None}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("SHARDS", "0", "an integer >= 1 and <= 4096"),
        ("SHARDS", "many", "an integer >= 1 and <= 4096"),
        ("SHARDS", "1e3", "an integer >= 1"),
        ("SHARDS", "0x10", "an integer >= 1"),
        ("SHARDS", "5.5", "an integer >= 1"),
        ("SHARDS", "1__0", "an integer >= 1"),
        ("SHARDS", "\u0663", "an integer >= 1"),
        ("SHARDS", "null", "an integer >= 1"),
        ("SHARDS", "9" * 5000, "an integer >= 1"),
        ("SPARK_EXECUTORS_MAX", "null", "an integer >= 1"),
        ("BATCH_CPU_SHARE", "0", "a number > 0 and <= 1000"),
        ("BATCH_CPU_SHARE", "nan", "a number > 0"),
        ("BATCH_CPU_SHARE", "inf", "a number > 0"),
        ("BATCH_CPU_SHARE", "1e400", "a number > 0"),
        ("BATCH_CPU_SHARE", "1,5", "a number > 0"),
        ("UP_KAFKA_PORT", "70000", "an integer >= 0 and <= 65535"),
        ("LOG_LEVEL", "loud", "'debug', 'info', 'warning' or 'error'"),
        (
            "KAFKA_FACTS_TOPIC",
            "two words",
            "expected 1 to 249 characters of a-z, A-Z, 0-9, dot, hyphen and underscore (",
        ),
        ("KAFKA_FACTS_TOPIC", "topic\n", "1 to 249 characters of"),
        ("KAFKA_POSITIONS_TOPIC", "topic\n", "1 to 249 characters of"),
        ("SPARK_MASTER", "local\n", "local, local[N], local[*], spark://host:port or k8s://https://host:port"),
        ("SPARK_DRIVER_MEMORY", "1g\n", "an integer with the unit k, m, g or t, such as 512m or 2g"),
        ("SPARK_DRIVER_MEMORY", "lots", "such as 512m or 2g"),
        ("KAFKA_CREATE_TOPICS", "perhaps", "true or false"),
        ("LINES_LISTEN", "9481", "such as 127.0.0.1:9481 or [::1]:9481"),
        ("LINES_LISTEN", "localhost:70000", "such as 127.0.0.1:9481"),
        ("LINES_REDIS_CHANNEL", "two words", "1 to 255 characters without white space"),
        ("LINES_REDIS_CHANNEL", "a\n", "1 to 255 characters without white space"),
        ("CHECKPOINT_STORE", "/shared", "a URI such as s3a://bucket/tidemark"),
        ("HISTORY_DAYS", "1000000", "an integer >= 1 and <= 36500"),
        ("HOME", "~/tide", "only a shell replaces ~"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(setenv: SetEnv, name: str, value: str, allowed: str) -> None:
    """The error names the variable, the value that it has, and which values it may have."""
    setenv(name, value)
    with pytest.raises(BadSetting) as caught:
        load()
    assert caught.value.name == f"TIDEMARK_{name}"
    assert repr(value) in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("shards", text, 5) for text in ("5", " 5 ", "5\n", "+5", "005", "5.0")),
        ("max_records_per_batch", "1_000_000", 1_000_000),
        *(("batch_cpu_share", text, 1.5) for text in ("1.5", " 1.5\n", "15e-1", "+1.5")),
        ("batch_cpu_share", "2", 2.0),
        *(("kafka_create_topics", text, True) for text in ("true", "True", "TRUE", "1", "yes", "On", "t", "y")),
        *(("kafka_create_topics", text, False) for text in ("false", "False", "0", "no", "OFF", "f", "n")),
        ("kafka_username", "null", "null"),
        ("kafka_ca_file", "null", Path("null")),
        ("no_color", "0", "0"),
        ("java_home", "jdk", Path("jdk")),
    ],
)
def test_text_of_a_variable_is_converted(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object) -> None:
    """Numbers and booleans may have each of these forms. No other text means true, false or no value."""
    monkeypatch.setenv(variable_of(name), text)
    converted = getattr(load(), name)
    assert (type(converted), converted) == (type(value), value)


def test_defaults_are_allowed_values() -> None:
    """Only values from variables are checked when the settings are loaded."""
    for name, field in FIELDS.items():
        if field.default is not None:
            assert field.convert(field.default) == field.default, name


def test_a_given_value_is_checked_and_precedes_the_variable(setenv: SetEnv) -> None:
    """The error names the variable of the setting, also if the name has no TIDEMARK_."""
    setenv("SHARDS", "many")
    assert load(shards=5).shards == 5
    for name, value in (("shards", 0), ("shards", None), ("log_level", ""), ("owner", ""), ("java_home", 5)):
        with pytest.raises(BadSetting) as caught:
            load(**{"shards": 5, name: value})
        assert caught.value.name == variable_of(name)


def test_settings_are_frozen(setenv: SetEnv) -> None:
    """A changed copy is checked as a whole."""
    settings = load()
    with pytest.raises(AttributeError):
        settings.shards = 5  # type: ignore[misc]
    with pytest.raises(ValueError, match="TIDEMARK_KAFKA_SSL_CERTIFICATE_FILE is not set"):
        msgspec.structs.replace(settings, kafka_ssl_key_file=Path("key"))


def test_a_pattern_is_described_in_words() -> None:
    """An operator need not read a regular expression."""
    for field in FIELDS.values():
        patterns = [item for item in field.metadata if isinstance(item, msgspec.Meta) and item.pattern is not None]
        assert all(item.description for item in patterns), field.name


@pytest.mark.parametrize("password", ["p@hunter2", "p/hunter2", "p@ss/hunter2", "hunter2/p", "hunter2%2"])
def test_unencoded_password_is_not_taken_for_an_address(setenv: SetEnv, password: str) -> None:
    """libpq would take a part of the password for the host or the database, which messages show."""
    setenv("POSTGRES_DSN", f"postgresql://ada:{password}@db:5432/tide")
    with pytest.raises(BadSetting, match=r"TIDEMARK_POSTGRES_DSN: .*percent-encoded") as caught:
        load()
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize("name", ["POSTGRES_DSN", "REDIS_URL"])
def test_wrong_secret_is_not_shown(setenv: SetEnv, name: str) -> None:
    """The error about a value that may hold a password does not repeat it."""
    setenv(name, "hunter2")
    with pytest.raises(BadSetting, match=f"TIDEMARK_{name}: the value is not allowed: not a") as caught:
        load()
    assert "hunter2" not in str(caught.value)


def test_login_needs_all_its_parts(setenv: SetEnv) -> None:
    """A protocol with a login names the settings that are missing for it."""
    setenv("KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    setenv("KAFKA_USERNAME", "ada")
    with pytest.raises(BadSetting, match=r"needs TIDEMARK_KAFKA_SASL_MECHANISM, TIDEMARK_KAFKA_PASSWORD$"):
        load()


def test_login_with_tokens_needs_other_parts(setenv: SetEnv) -> None:
    """OAUTHBEARER asks for a client and its secret, not for a user."""
    setenv("KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    setenv("KAFKA_SASL_MECHANISM", "OAUTHBEARER")
    setenv("KAFKA_SASL_OAUTHBEARER_CLIENT_ID", "tide")
    with pytest.raises(BadSetting, match=r"TOKEN_ENDPOINT_URL, TIDEMARK_KAFKA_SASL_OAUTHBEARER_CLIENT_SECRET$"):
        load()


def test_a_certificate_needs_its_key(setenv: SetEnv) -> None:
    """Half of a pair is an error that names the other half."""
    setenv("KAFKA_SSL_CERTIFICATE_FILE", "/etc/tide.pem")
    with pytest.raises(BadSetting, match="TIDEMARK_KAFKA_SSL_KEY_FILE is not set"):
        load()


def test_the_sidecars_certificate_needs_its_key(setenv: SetEnv) -> None:
    """Half of a pair would serve without TLS; it is an error that names the other half."""
    setenv("SIDECAR_KEY_FILE", "/etc/tide.pem")
    with pytest.raises(BadSetting, match="TIDEMARK_SIDECAR_CERTIFICATE_FILE is not set"):
        load()


def test_executors_come_and_go_only_with_a_store(setenv: SetEnv) -> None:
    """They would take states with them."""
    setenv("SPARK_EXECUTORS_MAX", "5")
    with pytest.raises(BadSetting, match=r"TIDEMARK_SPARK_EXECUTORS_MAX=5 needs TIDEMARK_CHECKPOINT_STORE"):
        load()
    setenv("CHECKPOINT_STORE", "s3a://bucket/tidemark")
    assert load().spark_executors_max == 5
    setenv("SPARK_EXECUTORS", "6")
    with pytest.raises(BadSetting, match=r"TIDEMARK_SPARK_EXECUTORS_MAX=5 is below TIDEMARK_SPARK_EXECUTORS=6"):
        load()


@pytest.mark.parametrize("store", ["bucket", "/shared"])
def test_a_store_is_a_uri(setenv: SetEnv, store: str) -> None:
    """What is meant by a path alone depends on Spark's default file system."""
    setenv("CHECKPOINT_STORE", store)
    with pytest.raises(BadSetting, match="TIDEMARK_CHECKPOINT_STORE"):
        load()


def test_secret_in_a_file_is_read_anew(setenv: SetEnv, tmp_path: Path) -> None:
    """What was loaded before a secret rotated gives the new one; a file that is away for a moment costs nothing."""
    for name in ("KAFKA_PASSWORD", "POSTGRES_PASSWORD", "REDIS_PASSWORD"):
        setenv(f"{name}_FILE", str(tmp_path / "secret"))
    (tmp_path / "secret").write_text("one\n")
    settings = load()
    for now in ("one", "two"):
        (tmp_path / "secret").write_text(now)
        assert settings.kafka.password == settings.redis.password() == now
        assert f"password={now}" in settings.postgres()
    (tmp_path / "secret").unlink()
    assert settings.kafka.password == "one"


def test_secret_comes_from_a_file(setenv: SetEnv, tmp_path: Path) -> None:
    """`..._FILE` names a file with the secret; the line end that editors add is no part of it."""
    (tmp_path / "secret").write_text("hunter2\n")
    setenv("KAFKA_PASSWORD_FILE", str(tmp_path / "secret"))
    assert load().kafka.password == "hunter2"


def test_secret_file_must_be_readable(setenv: SetEnv, tmp_path: Path) -> None:
    """A secret file that is not there is an error, never an empty secret."""
    setenv("POSTGRES_DSN_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(BadSetting, match=r"TIDEMARK_POSTGRES_DSN_FILE: cannot read .*nowhere: No such file"):
        load()


def test_secret_file_must_be_text(setenv: SetEnv, tmp_path: Path) -> None:
    """The error does not show the content of the file. If a rotation writes such a file, the earlier secret counts."""
    (tmp_path / "secret").write_text("one")
    setenv("KAFKA_PASSWORD_FILE", str(tmp_path / "secret"))
    settings = load()
    (tmp_path / "secret").write_bytes(b"hunter2\xff")
    with pytest.raises(
        BadSetting, match=r"TIDEMARK_KAFKA_PASSWORD_FILE: cannot read .*: the file is not text"
    ) as caught:
        load()
    assert "hunter" not in str(caught.value)
    assert settings.kafka.password == "one"


def test_secret_may_be_given_only_once(setenv: SetEnv, tmp_path: Path) -> None:
    """A secret both in the environment and in a file is an error: nobody could say which one counts."""
    (tmp_path / "secret").write_text("one")
    setenv("KAFKA_PASSWORD_FILE", str(tmp_path / "secret"))
    setenv("KAFKA_PASSWORD", "two")
    with pytest.raises(BadSetting, match="TIDEMARK_KAFKA_PASSWORD is set too"):
        load()


def test_running_stack_fills_in_what_is_not_set(setenv: SetEnv, tmp_path: Path) -> None:
    """Without settings a command finds the stack that runs in the home; a variable still wins."""
    (tmp_path / "stack.env").write_text(
        "export TIDEMARK_KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:1\nexport TIDEMARK_REDIS_URL='redis://127.0.0.1:2/0'\n"
    )
    setenv("REDIS_URL", "redis://elsewhere/0")
    settings = load()
    assert settings.kafka_bootstrap_servers == "127.0.0.1:1"
    assert settings.redis_url.get_secret_value() == "redis://elsewhere/0"


def test_setting_counts_as_set_if_any_source_has_a_text(setenv: SetEnv, tmp_path: Path) -> None:
    """An empty variable, secret file or line of the running stack sets nothing."""
    (tmp_path / "secret").touch()
    (tmp_path / "stack.env").write_text("export TIDEMARK_SHARDS=8\nexport TIDEMARK_LEASE_SECONDS=\n")
    setenv("POSTGRES_DSN", "")
    setenv("REDIS_URL_FILE", str(tmp_path / "secret"))
    assert [name for name in FIELDS if is_set(name)] == ["home", "shards"]
    (tmp_path / "secret").write_text("redis://elsewhere/0")
    assert is_set("redis_url")


def test_config_masks_every_secret_and_says_where_values_come_from(setenv: SetEnv, tmp_path: Path) -> None:
    """No secret of any setting is printed, whatever its form, and each line ends with its origin."""
    (tmp_path / "secret").write_text("host=db user=ada password='hunter 2' sslpassword=hunter2")
    (tmp_path / "stack.env").write_text("export TIDEMARK_KAFKA_PASSWORD=hunter2\n")
    setenv("POSTGRES_DSN_FILE", str(tmp_path / "secret"))
    setenv("REDIS_URL", "rediss://:hunter2@@cache:6379/0")
    setenv("KAFKA_SASL_OAUTHBEARER_CLIENT_SECRET", "hunter2")
    printed = "\n".join(settings_lines(load()))
    assert "hunter" not in printed
    line = {line.split()[0]: line.rstrip() for line in printed.splitlines()}
    assert "host=db user=ada password=*** sslpassword=***" in line["TIDEMARK_POSTGRES_DSN"]
    assert line["TIDEMARK_POSTGRES_DSN"].endswith(str(tmp_path / "secret"))
    assert "rediss://:***@cache:6379/0" in line["TIDEMARK_REDIS_URL"]
    assert line["TIDEMARK_REDIS_URL"].endswith("environment")
    assert line["TIDEMARK_KAFKA_PASSWORD"].endswith(str(tmp_path / "stack.env"))
    assert line["TIDEMARK_SHARDS"].endswith("default")


SECRETS = [name for name, field in FIELDS.items() if field.is_secret]
OTHERS = [name for name in FIELDS if name not in SECRETS]
WITH_PASSWORD = [
    "hunter2",
    "rediss://ada:hunter2@host:6379/0",
    "postgresql://ada:hunter2@host/db?sslpassword=hunter2",
    "host=db password = hunter2 oauth_client_secret='hunter2'",
    "https://ada:hunter2@host/token",
    "s3a://ada:hunter2@host/token",
]


def test_what_is_called_a_secret_is_one() -> None:
    """By its type, that is: what may be shown of it, `config` knows. Paths name files, which are no secrets."""
    secret = re.compile(r"(password|secret|token|key|dsn|credentials?|url)$")
    assert {name for name in FIELDS if secret.search(name)} == set(SECRETS)
    assert {name for name, field in FIELDS.items() if "SecretStr" in repr(field.type)} == set(SECRETS)


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_is_ever_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Not by `config`, nor in the settings' own text, nor in a refusal; whether it is set or in a file."""
    (tmp_path / "secret").touch()
    taken = 0
    for value in WITH_PASSWORD:
        for variable, given in ((variable_of(name), value), (f"{variable_of(name)}_FILE", str(tmp_path / "secret"))):
            (tmp_path / "secret").write_text(value)
            with monkeypatch.context() as patch:
                patch.setenv(variable, given)
                try:
                    settings = load()
                except BadSetting as problem:
                    shown = str(problem)
                else:
                    taken += 1
                    shown = "\n".join(settings_lines(settings)) + repr(settings) + str(msgspec.structs.asdict(settings))
            assert "hunter" not in shown, value
    assert taken


@pytest.mark.parametrize("name", OTHERS)
def test_no_password_in_an_address_is_ever_shown(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also where a person puts it into a setting that should have none, taken or refused."""
    for value in WITH_PASSWORD[1:]:
        monkeypatch.setenv(variable_of(name), value)
        try:
            shown = "\n".join(settings_lines(load()))
        except BadSetting as problem:
            shown = str(problem)
        assert "hunter" not in shown, value


@pytest.mark.parametrize(
    "url",
    [
        "https://hunter2@otel.example:4318",
        "https://ada:hunter2@otel.example:4318/",
        "https://otel.example:4318/v1/hunter2",
        "https://otel.example:4318?api-key=hunter2",
        "https://otel.example:4318#hunter2",
    ],
)
def test_key_in_the_address_of_a_collector_is_never_shown(setenv: SetEnv, url: str) -> None:
    """Wherever it stands: of the address of a web service only host and port are shown."""
    setenv("OTLP_URL", url)
    shown = "\n".join(settings_lines(load())) + repr(load())
    assert "hunter" not in shown
    assert "https://otel.example:4318" in shown


def test_trusted_proxies_are_addresses_or_networks(setenv: SetEnv) -> None:
    """As uvicorn takes them; a name would be trusted in silence by nobody."""
    setenv("SIDECAR_TRUSTED_PROXIES", "10.0.0.7, 10.1.0.0/16,2001:db8::/32")
    assert load().sidecar_proxies == ["10.0.0.7", "10.1.0.0/16", "2001:db8::/32"]
    setenv("SIDECAR_TRUSTED_PROXIES", "proxy.example")
    with pytest.raises(BadSetting, match="TIDEMARK_SIDECAR_TRUSTED_PROXIES"):
        load()


def test_config_points_at_a_typing_error(setenv: SetEnv) -> None:
    """A variable that is no setting is named, with the setting that was probably meant."""
    setenv("SHARD", "8")
    setenv("JAVA", "/opt/java")
    lines = list(settings_lines(load()))
    assert "TIDEMARK_SHARD is not a setting; did you mean TIDEMARK_SHARDS?" in lines
    assert "TIDEMARK_JAVA is not a setting; did you mean JAVA_HOME?" in lines


def test_settings_never_show_a_secret_by_accident(setenv: SetEnv) -> None:
    """The text of the settings object, as a log line or a traceback would show it, holds no password."""
    setenv("KAFKA_PASSWORD", "hunter2")
    setenv("POSTGRES_DSN", "postgresql://ada:hunter2@db/tidemark")
    settings = load()
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in repr(settings.kafka)
    with pytest.raises(TypeError, match="SecretStr"):
        msgspec.json.encode(settings.kafka_password)


def test_child_gets_the_stacks_settings_in_place_of_ours(setenv: SetEnv, tmp_path: Path) -> None:
    """What `up` says of the stack wins in its children, also over a secret file of the user's own."""
    setenv("POSTGRES_DSN_FILE", str(tmp_path / "mine"))
    setenv("SHARDS", "8")
    child = child_environment({"TIDEMARK_POSTGRES_DSN": "postgresql://stack/tidemark"})
    assert child["TIDEMARK_POSTGRES_DSN"] == "postgresql://stack/tidemark"
    assert "TIDEMARK_POSTGRES_DSN_FILE" not in child
    assert child["TIDEMARK_SHARDS"] == "8"


def test_config_shows_a_value_of_several_lines_on_one(setenv: SetEnv) -> None:
    """One line for each setting."""
    setenv("SIDECAR_BANNER", "staging\nAsk Ada.")
    assert any("staging\\nAsk Ada.  " in line for line in settings_lines(load()))
