"""The chart's alerts before Prometheus's own `promtool`: which fire when, and that no other does."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.tools import alert_rules, run

pytestmark = [
    pytest.mark.skipif(
        shutil.which("promtool") is None, reason="there is no promtool: Debian's package prometheus has it"
    ),
    pytest.mark.slow,
]

HOUR = 60  # samples: one a minute, the first at 0
POD, RELAY = 'pod="tidemark-pipeline-0"', 'pod="tidemark-relay-shop-5f7d-x2x4"'
BRIDGE, NEXT = 'pod="tidemark-synapse-6c9f-k8k2"', 'pod="tidemark-synapse-6c9f-m4m7"'
STREAM, WRITER = 'stream="orders"', 'stream="orders",writer="w1"'
HELD = f"tidemark_linear_blocked_seconds{{{POD},{WRITER},reason=%s}}"
SEEN = f"tidemark_blocker_last_seen_seconds{{{POD},{WRITER},reason=%s}}"

IN_POSTGRES = f'tidemark_sink_linear_position{{{POD},{STREAM},copy="postgres"}}'
IN_REDIS = f'tidemark_sink_linear_position{{{POD},{STREAM},copy="redis"}}'
IN_SIDECAR = f'tidemark_sink_linear_position{{pod="tidemark-sidecar-0",{STREAM},copy="sidecar"}}'
BEHIND = f'tidemark_synapse_lag_seconds{{{BRIDGE},{STREAM},writer="%s"}}'
READER = f'tidemark_reader_%s{{pod="tidemark-sidecar-0",{STREAM},reader="mailer"}}'
OLDEST = f"tidemark_synapse_oldest_transaction_seconds{{{BRIDGE},{STREAM}}}"

Series = dict[str, str]
"""By name and labels, in promtool's notation: `0+60x5` begins at 0 and rises by 60 five times, `_` is no sample."""


def always(value: int) -> str:
    return f"{value}+0x{HOUR}"


def since(minutes: int, value: int = 1) -> str:
    """0, and `value` from then on."""
    return f"0+0x{minutes - 1} {value}+0x{HOUR}"


def ages(minutes: int) -> str:
    """Seconds that rise with the clock from then on; 0 before."""
    return f"0+0x{minutes} 60+60x{HOUR}"


CLOCK = f"0+60x{HOUR}"
QUIET: Series = {
    f"tidemark_pipeline_ready{{{POD}}}": always(1),
    f"tidemark_started_timestamp_seconds{{{POD}}}": always(-86400),
    f"tidemark_heartbeat_timestamp_seconds{{{POD}}}": CLOCK,
    f"tidemark_last_batch_timestamp_seconds{{{POD}}}": always(0),  # nothing came since
    f"tidemark_lease_token{{{POD}}}": always(7),
    f'tidemark_sink_errors{{{POD},sink="redis"}}': always(0),
    f"tidemark_clock_difference_seconds{{{POD}}}": always(0),
    f'tidemark_kafka_lag_records{{{POD},topic="tidemark.facts",partition="0"}}': always(0),
    f'tidemark_kafka_blocked_seconds{{{POD},topic="tidemark.facts",partition="0"}}': always(0),
    f"tidemark_linear_position{{{POD},{STREAM}}}": always(20),
    f"tidemark_allocated_position{{{POD},{STREAM}}}": always(20),
    IN_POSTGRES: always(20),
    IN_REDIS: always(20),
    IN_SIDECAR: always(20),
    f"tidemark_oldest_gap_age_seconds{{{POD},{STREAM}}}": always(0),
    f"tidemark_linear_lag_ids{{{POD},{STREAM}}}": always(0),
    f"tidemark_linear_lag_seconds{{{POD},{STREAM}}}": always(0),
    f"tidemark_unknown_writers{{{POD},{STREAM}}}": always(0),
    f"tidemark_policy_gap_seconds{{{POD},{STREAM}}}": always(120),
    f"tidemark_policy_silent_seconds{{{POD},{STREAM}}}": always(60),
    f'tidemark_dead_letters_total{{{POD},reason="not_json"}}': always(0),
    f'tidemark_records_total{{{POD},outcome="late"}}': always(0),
    f"tidemark_source_regressions_total{{{POD}}}": always(0),
    f'tidemark_operator_overrides_total{{{POD},kind="SKIP"}}': always(0),
    'tidemark_sidecar_server_up{pod="tidemark-sidecar-0",server="redis"}': always(1),
    'tidemark_sidecar_server_up{pod="tidemark-sidecar-0",server="postgres"}': always(1),
    'tidemark_sidecar_chain_errors_total{pod="tidemark-sidecar-0",fault="hole"}': always(0),
    f"tidemark_relay_active{{{RELAY}}}": always(1),
    f"tidemark_relay_last_poll_timestamp_seconds{{{RELAY}}}": CLOCK,
    f"tidemark_relay_outbox_ids{{{RELAY},{STREAM}}}": always(0),
    f"tidemark_relay_blocked_streams{{{RELAY},{STREAM}}}": always(0),
    f"tidemark_relay_oversized_facts{{{RELAY},{STREAM}}}": always(0),
    f"tidemark_synapse_active{{{BRIDGE}}}": always(1),
    f"tidemark_synapse_active{{{NEXT}}}": always(0),  # another pod that waits for its turn
    f"tidemark_synapse_started_timestamp_seconds{{{BRIDGE}}}": always(-86400),
    f"tidemark_synapse_sent_timestamp_seconds{{{BRIDGE}}}": CLOCK,
    f"tidemark_synapse_sent_timestamp_seconds{{{NEXT}}}": always(0),
    f"tidemark_synapse_listening{{{BRIDGE}}}": always(1),
    f"tidemark_synapse_listening{{{NEXT}}}": always(0),
    f"tidemark_synapse_silent_writers{{{BRIDGE},{STREAM}}}": always(0),
    f"tidemark_synapse_late_total{{{BRIDGE},{STREAM}}}": always(0),
    f"tidemark_synapse_oversized_facts{{{BRIDGE},{STREAM}}}": always(0),
    f"tidemark_synapse_blocked_streams{{{BRIDGE},{STREAM}}}": always(0),
    BEHIND % "event1": always(0),
    BEHIND % "event2": always(0),
}


def one(name: str) -> str:
    """The series of `QUIET` that has this name, of the pod that does its work."""
    [found] = [series for series in QUIET if series.startswith(name + "{") and NEXT not in series]
    return found


MOVED = f"20+0x9 20+7x{HOUR}"
MOVING: Series = {
    one("tidemark_linear_position"): MOVED,
    one("tidemark_allocated_position"): MOVED,
    IN_POSTGRES: MOVED,
}
FOLLOWED: Series = {**MOVING, IN_REDIS: MOVED, IN_SIDECAR: MOVED}
# What befalls the quiet system from minute 10 on (`_`: that series is gone), and what must fire at minute 40 for it.
FAULTS: dict[str, tuple[Series, set[str]]] = {
    "the pipeline is gone": (
        {series: f"{values.split('x')[0]}x9 stale" for series, values in QUIET.items() if POD in series},
        {"TidemarkPipelineNotReady"},
    ),
    "the pipeline waits for a server": (
        {one("tidemark_pipeline_ready"): "1+0x9 0+0x60"},
        {"TidemarkPipelineNotReady"},
    ),
    "the loop hangs": ({one("tidemark_heartbeat_timestamp_seconds"): "0+60x9 540+0x60"}, {"TidemarkLoopStuck"}),
    "the query stands while records wait": ({one("tidemark_kafka_lag_records"): since(10)}, {"TidemarkNoBatches"}),
    "a Kafka transaction hangs, and the records behind it wait": (
        {one("tidemark_kafka_blocked_seconds"): ages(10), one("tidemark_kafka_lag_records"): since(10)},
        {"TidemarkKafkaTransactionOpen"},
    ),
    "Kafka is away, so that nobody knows whether records wait": (
        {f'tidemark_retries_total{{{POD},what="Kafka"}}': f"_x10 1+12x{HOUR}"},
        {"TidemarkPipelineServerDown"},
    ),
    "a stream cannot be shown in Redis": ({one("tidemark_sink_errors"): since(10)}, {"TidemarkSinkErrors"}),
    "the host's clock is nine days ahead": (
        {one("tidemark_clock_difference_seconds"): since(10, 777_600)},
        {"TidemarkClocksDiffer"},
    ),
    "the pipeline is too slow": (
        {
            one("tidemark_kafka_lag_records"): since(10, 2_000_000),
            one("tidemark_last_batch_timestamp_seconds"): CLOCK,
        },
        {"TidemarkKafkaLag"},
    ),
    "Kafka lost what was read": ({one("tidemark_kafka_lag_records"): since(10, -3)}, {"TidemarkKafkaRecordsLost"}),
    "a transaction hangs above which its writer went on": (
        {
            one("tidemark_oldest_gap_age_seconds"): ages(10),
            one("tidemark_linear_lag_seconds"): ages(10),
            one("tidemark_allocated_position"): f"20+0x9 20+7x{HOUR}",
            one("tidemark_linear_lag_ids"): f"0+0x9 0+7x{HOUR}",
            HELD % '"gap"': f"_x10 60+60x{HOUR}",
            SEEN % '"gap"': f"_x10 {always(1)}",
        },
        {"TidemarkGapOld"},
    ),
    "a writer dies without a gap": (
        {
            one("tidemark_linear_lag_seconds"): ages(10),
            one("tidemark_allocated_position"): f"20+0x9 20+7x{HOUR}",
            one("tidemark_linear_lag_ids"): f"0+0x9 0+7x{HOUR}",
            HELD % '"silent"': f"_x10 60+60x{HOUR}",
            SEEN % '"silent"': f"_x10 60+60x{HOUR}",
        },
        {"TidemarkWriterSilent"},
    ),
    "a writer of which nothing was ever noted is silent": (
        {
            one("tidemark_linear_lag_seconds"): ages(10),
            one("tidemark_allocated_position"): f"20+0x9 20+7x{HOUR}",
            one("tidemark_linear_lag_ids"): f"0+0x9 0+7x{HOUR}",
            HELD % '"silent"': f"_x10 60+60x{HOUR}",
        },
        {"TidemarkWriterSilent"},
    ),
    "a writer lives, and its transaction hangs": (
        {
            one("tidemark_linear_lag_seconds"): ages(10),
            one("tidemark_allocated_position"): f"20+0x9 20+7x{HOUR}",
            one("tidemark_linear_lag_ids"): f"0+0x9 0+7x{HOUR}",
            HELD % '"transaction"': f"_x10 60+60x{HOUR}",
            SEEN % '"transaction"': f"_x10 {always(1)}",
        },
        {"TidemarkWriterBlocking"},
    ),
    "a writer never joined": (
        {
            one("tidemark_unknown_writers"): since(10),
            one("tidemark_oldest_gap_age_seconds"): ages(10),
            one("tidemark_linear_lag_seconds"): ages(10),
            HELD % '"unknown"': f"_x10 60+60x{HOUR}",
            one("tidemark_allocated_position"): f"20+0x9 20+7x{HOUR}",
        },
        {"TidemarkUnknownWriter"},
    ),
    "a reader hangs while its stream goes on": (
        {**FOLLOWED, READER % "lag_seconds": ages(10), READER % "linear_position": always(20)},
        {"TidemarkReaderStuck"},
    ),
    "a reader is far behind, and reads on": (
        {**FOLLOWED, READER % "lag_seconds": ages(10), READER % "linear_position": f"20+1x{HOUR}"},
        set(),
    ),
    "IDs are given out, and nobody is named who holds the line": (
        {one("tidemark_linear_lag_seconds"): ages(10), one("tidemark_allocated_position"): f"20+0x9 20+7x{HOUR}"},
        {"TidemarkStreamStuck"},
    ),
    "a stream is farther behind in time than its policy allows, though nobody is old": (
        {
            one("tidemark_linear_lag_seconds"): since(10, 50),
            f"tidemark_policy_linear_lag_seconds{{{POD},{STREAM}}}": always(30),
        },
        {"TidemarkLinearLagHigh"},
    ),
    "a stream is farther behind in IDs than its policy allows": (
        {one("tidemark_linear_lag_ids"): since(10, 9), f"tidemark_policy_linear_lag_ids{{{POD},{STREAM}}}": always(8)},
        {"TidemarkLinearLagHigh"},
    ),
    "a gap that would be young elsewhere is old in this stream": (
        {one("tidemark_oldest_gap_age_seconds"): since(10, 50), one("tidemark_policy_gap_seconds"): always(30)},
        {"TidemarkGapOld"},
    ),
    "a gap that would be old elsewhere is young in this stream": (
        {one("tidemark_oldest_gap_age_seconds"): since(10, 5000), one("tidemark_policy_gap_seconds"): always(6000)},
        set(),
    ),
    "a stream whose line may stand for long has a line that stands": (
        {
            one("tidemark_linear_lag_seconds"): ages(10),
            one("tidemark_allocated_position"): f"20+0x9 20+7x{HOUR}",
            HELD % '"silent"': f"_x10 60+60x{HOUR}",
            SEEN % '"silent"': f"_x10 60+60x{HOUR}",
            one("tidemark_policy_gap_seconds"): always(6000),
        },
        set(),
    ),
    "a writer that may be silent for an hour is so": (
        {
            one("tidemark_linear_lag_seconds"): ages(10),
            HELD % '"silent"': f"_x10 60+60x{HOUR}",
            SEEN % '"silent"': f"_x10 60+60x{HOUR}",
            one("tidemark_policy_silent_seconds"): always(3600),
        },
        {"TidemarkWriterBlocking"},
    ),
    "a sidecar reads from a replica that does not follow": (
        MOVING | {IN_REDIS: MOVED, IN_SIDECAR: f"20+0x{HOUR}"},
        {"TidemarkCopiesDiffer"},
    ),
    "Redis is not filled": (MOVING | {IN_SIDECAR: MOVED}, {"TidemarkCopiesDiffer"}),
    "Postgres was restored from a backup, and Redis knows more": (
        {
            one("tidemark_linear_position"): f"20+0x9 12+0x{HOUR}",
            one("tidemark_allocated_position"): f"20+0x9 14+0x{HOUR}",
            IN_POSTGRES: f"20+0x9 12+0x{HOUR}",
        },
        {"TidemarkPositionAboveHead"},
    ),
    "a bound is nearly reached": (
        {f'tidemark_bound_used_ratio{{{POD},{STREAM},bound="pending"}}': f"_x10 0.5+0.02x{HOUR}"},
        {"TidemarkStreamNearBound"},
    ),
    "a second pipeline believes that it owns the lease": (
        {'tidemark_lease_token{pod="tidemark-pipeline-1"}': since(10, 8)},
        {"TidemarkTwoLeaseOwners"},
    ),
    "the sidecar reaches no Redis": (
        {'tidemark_sidecar_server_up{pod="tidemark-sidecar-0",server="redis"}': "1+0x9 0+0x60"},
        {"TidemarkSidecarServerDown"},
    ),
    "nobody relays": ({one("tidemark_relay_active"): "1+0x9 0+0x60"}, {"TidemarkRelaySilent"}),
    "the relay is stuck": (
        {one("tidemark_relay_last_poll_timestamp_seconds"): "0+60x9 540+0x60"},
        {"TidemarkRelayStuck"},
    ),
    "the outbox grows": ({one("tidemark_relay_outbox_ids"): "0+9000x60"}, {"TidemarkRelayOutboxLarge"}),
    "a transaction of a service hangs": (
        {f"tidemark_relay_oldest_transaction_seconds{{{RELAY},{WRITER}}}": f"_x10 60+60x{HOUR}"},
        {"TidemarkRelayTransactionOld"},
    ),
    "a sequence is unfit": ({one("tidemark_relay_blocked_streams"): since(10)}, {"TidemarkRelayStreamBlocked"}),
    "a fact is too large for the topic": (
        {one("tidemark_relay_oversized_facts"): since(10)},
        {"TidemarkRelayFactTooLarge"},
    ),
    "a relay sends no heartbeat": (
        {f"tidemark_source_silent_seconds{{{POD},{WRITER}}}": f"_x10 66+60x{HOUR}"},
        {"TidemarkSourceSilent"},
    ),
    "no heartbeat was read, and the pipeline lags: the relay may run": (
        {
            f"tidemark_source_silent_seconds{{{POD},{WRITER}}}": f"_x10 66+60x{HOUR}",
            f'tidemark_kafka_lag_seconds{{{POD},topic="tidemark.facts",partition="0"}}': ages(10),
        },
        set(),
    ),
    "a relay reports what it holds back": (
        {f"tidemark_source_blocked_seconds{{{POD},{WRITER}}}": f"_x10 0+60x{HOUR}"},
        {"TidemarkSourceBlocked"},
    ),
    "a sequence of Synapse is unfit": (
        {one("tidemark_synapse_blocked_streams"): since(10)},
        {"TidemarkBridgeStreamBlocked"},
    ),
    "the bridge to Synapse is gone": (
        {series: f"{values.split('x')[0]}x9 stale" for series, values in QUIET.items() if BRIDGE in series},
        {"TidemarkBridgeSilent"},
    ),
    "the bridge waits for a server": ({one("tidemark_synapse_active"): "1+0x9 0+0x60"}, {"TidemarkBridgeSilent"}),
    "Kafka takes nothing of the bridge": (
        {one("tidemark_synapse_sent_timestamp_seconds"): "0+60x9 540+0x60"},
        {"TidemarkBridgeStuck"},
    ),
    "the bridge does not reach Synapse's Redis, while workers write": (
        {
            one("tidemark_synapse_listening"): "1+0x9 0+0x60",
            BEHIND % "event1": ages(10),
            BEHIND % "event2": ages(10),
        },
        {"TidemarkBridgeRedisDown"},
    ),
    "the bridge listens where no worker speaks": (
        {BEHIND % "event1": ages(10), BEHIND % "event2": ages(10)},
        {"TidemarkBridgeNoPositions"},
    ),
    "one worker of Synapse says nothing, of which Tidemark's own alerts tell": ({BEHIND % "event1": ages(10)}, set()),
    "a worker is not started": ({one("tidemark_synapse_silent_writers"): since(10)}, {"TidemarkBridgeWorkerMissing"}),
    "a record of Synapse is too large for the topic": (
        {one("tidemark_synapse_oversized_facts"): since(10)},
        {"TidemarkBridgeRecordTooLarge"},
    ),
    "a transaction of a dead worker holds all": (
        {OLDEST: f"_x10 60+60x{HOUR}", BEHIND % "event1": ages(10), BEHIND % "event2": ages(10)},
        {"TidemarkBridgeTransactionOld"},
    ),
}
# What happens once, at minute 30: told until minute 40.
EVENTS: dict[str, tuple[Series, set[str]]] = {
    "a dead letter": ({one("tidemark_dead_letters_total"): since(30)}, {"TidemarkDeadLetters"}),
    "a late fact": ({one("tidemark_records_total"): since(30)}, {"TidemarkLateCompletions"}),
    "a late fact of Synapse": ({one("tidemark_synapse_late_total"): since(30)}, {"TidemarkBridgeLateFacts"}),
    "an operator's SKIP": ({one("tidemark_operator_overrides_total"): since(30)}, {"TidemarkManualOverride"}),
    "a new timeline": ({one("tidemark_source_regressions_total"): since(30)}, {"TidemarkSourceRegressed"}),
}


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(alert_rules())
    run("promtool", "check", "rules", path)
    groups = path.with_name("groups.json")
    groups.write_text(json.dumps(yaml.safe_load(path.read_text())["groups"], ensure_ascii=False))
    return groups


def check(rules: Path, series: Series, told: Mapping[int, set[str]]) -> None:
    """At each of these minutes exactly those alerts fire, and at no other minute of the hour any but those."""

    def but(minute: int) -> str:
        return "" if minute in told else "|".join(sorted(set().union(*told.values()))) or "none"

    asked = [
        {
            "expr": f'group by (alertname) (ALERTS{{alertstate="firing",alertname!~"{but(minute)}"}})',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in told.get(minute, ())],
        }
        for minute in range(HOUR)
    ]
    run_test(rules, series, {"promql_expr_test": asked})


def run_test(rules: Path, series: Series, wanted: Mapping[str, object]) -> None:
    given = [{"series": name.replace("{", '{namespace="streams",'), "values": it} for name, it in series.items()]
    test = {"interval": "1m", "input_series": given, **wanted}
    concerned = rules.parent / "concerned.yaml"
    concerned.write_text(json.dumps({"groups": those_that_ask_for(changed(series), rules)}))  # JSON is YAML
    path = rules.parent / "test.yaml"
    path.write_text(json.dumps({"rule_files": [concerned.name], "evaluation_interval": "1m", "tests": [test]}))
    run("promtool", "test", "rules", path)


def changed(series: Series) -> set[str]:
    """The metrics whose series are not those of the quiet system."""
    return {name.partition("{")[0] for name, _ in series.items() ^ QUIET.items()}


def those_that_ask_for(metrics: set[str], rules: Path) -> list[dict[str, Any]]:
    """Groups of the rules that name one of `metrics`; without any all. To the others the system is the quiet one, of
    which a test of its own says that they do not fire. Without them promtool takes a third of the time."""
    groups: list[dict[str, Any]] = json.loads(rules.read_text())
    asked = re.compile(rf"\b({'|'.join(metrics)})\b")
    return [
        group | {"rules": [rule for rule in group["rules"] if not metrics or asked.search(json.dumps(rule))]}
        for group in groups
    ]


def test_a_rule_names_what_it_asks_for(rules: Path) -> None:
    """Else it could fire of what its text does not show, and `those_that_ask_for` would leave it out."""
    assert not re.search(r"__name__|ALERTS|\bquery\b", rules.read_text())
    for rule in (rule for group in json.loads(rules.read_text()) for rule in group["rules"]):
        assert "alert" in rule  # what is recorded would be asked for by its own name
        assert not re.search(r"(^|[^\w\s])\s*\{", rule["expr"]), rule["expr"]


def test_no_alert_on_a_quiet_system(rules: Path) -> None:
    """Nothing comes for an hour: no minute of it has an alert."""
    check(rules, QUIET, {})


def test_no_alert_on_a_busy_system(rules: Path) -> None:
    """Positions move, what waits is a batch's, IDs are open for seconds, and a counter of old trouble stands."""
    moving = {
        one("tidemark_last_batch_timestamp_seconds"): CLOCK,
        one("tidemark_kafka_lag_records"): " ".join(["900000 0 40"] * 20),
        one("tidemark_linear_position"): f"0+60000x{HOUR}",
        one("tidemark_allocated_position"): f"800+60000x{HOUR}",
        IN_POSTGRES: f"0+0x1 0+60000x{HOUR}",
        IN_REDIS: f"0+0x1 0+60000x{HOUR}",  # compared a minute ago
        IN_SIDECAR: f"900+60000x{HOUR}",  # scraped a little later than the pipeline
        one("tidemark_linear_lag_ids"): " ".join(["800 0 90"] * 20),
        one("tidemark_linear_lag_seconds"): " ".join(["2 0 1"] * 20),
        one("tidemark_oldest_gap_age_seconds"): " ".join(["2 0 100"] * 20),
        one("tidemark_dead_letters_total"): always(3),
        one("tidemark_records_total"): always(9),
        f'tidemark_retries_total{{{POD},what="Redis"}}': f"4+0x20 9+0x{HOUR}",  # it failed over
        one("tidemark_relay_outbox_ids"): " ".join(["5000 0 700"] * 20),
        BEHIND % "event1": " ".join(["1 0 40"] * 20),
        OLDEST: " ".join(["1 0 40"] * 20),
    }
    check(rules, QUIET | moving, {})


def test_no_alert_in_the_first_minutes_after_a_start(rules: Path) -> None:
    """Nothing is scraped before minute 1; then a pipeline that takes four minutes to start, and reads what waits."""
    starting = {series: f"_ {values}" for series, values in QUIET.items()}
    starting |= {
        one("tidemark_started_timestamp_seconds"): f"_ {always(50)}",
        one("tidemark_pipeline_ready"): f"_ 0+0x3 {always(1)}",
        one("tidemark_heartbeat_timestamp_seconds"): f"_x4 240+60x{HOUR}",
        one("tidemark_last_batch_timestamp_seconds"): f"_x4 240+60x{HOUR}",
        one("tidemark_linear_position"): f"_x4 9000+60000x{HOUR}",
        one("tidemark_allocated_position"): f"_x4 9100+60000x{HOUR}",
        IN_REDIS: f"_x4 20 20 69000+60000x{HOUR}",
        IN_POSTGRES: f"_x4 20 20 69000+60000x{HOUR}",
        IN_SIDECAR: f"_x6 9500+60000x{HOUR}",
        one("tidemark_kafka_lag_records"): f"_ 3000000+0x3 800000 0+0x{HOUR}",
        one("tidemark_relay_active"): f"_ 0 {always(1)}",
        one("tidemark_synapse_active"): f"_ 0 {always(1)}",
        one("tidemark_synapse_silent_writers"): f"_ _ 2 2 1 {always(0)}",
        'tidemark_sidecar_server_up{pod="tidemark-sidecar-0",server="redis"}': f"_ 0+0x3 {always(1)}",
    }
    check(rules, starting, {})


def test_no_alert_after_a_restart_that_took_some_minutes(rules: Path) -> None:
    """What was open for a moment at the end seems to be open since then, until all that waits in Kafka was read: here
    from minute 24 to 27. Who was heard of last before the end seems to be silent."""
    quiet = {series: values for series, values in QUIET.items() if POD in series}
    restarted = {series: f"{values.split('x')[0]}x19 stale _x3 {values}" for series, values in quiet.items()}
    open_until_read = f"0+0x19 stale _x3 240+60x3 0+0x{HOUR}"
    restarted |= {
        one("tidemark_started_timestamp_seconds"): f"-86400+0x19 stale _x3 {always(1430)}",
        one("tidemark_heartbeat_timestamp_seconds"): f"0+60x19 stale _x3 1440+60x{HOUR}",
        one("tidemark_last_batch_timestamp_seconds"): f"0+60x19 stale _x3 1440+60x{HOUR}",
        one("tidemark_kafka_lag_records"): f"0+0x19 stale _x3 900000+0x3 0+0x{HOUR}",
        one("tidemark_allocated_position"): f"20+0x19 stale _x3 20+9x{HOUR}",
        one("tidemark_oldest_gap_age_seconds"): open_until_read,
        one("tidemark_linear_lag_seconds"): open_until_read,
        HELD % '"silent"': "_x24 240+60x3 stale",
        SEEN % '"silent"': "_x24 240+60x3 stale",
    }
    check(rules, QUIET | restarted, {})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_lasts_is_told_by_its_alert_alone(rules: Path, fault: str) -> None:
    """Half an hour later, and not before it."""
    series, alerts = FAULTS[fault]
    check(rules, QUIET | series, {9: set(), 40: alerts})


@pytest.mark.parametrize("event", EVENTS)
def test_what_happened_once_is_told_for_some_minutes(rules: Path, event: str) -> None:
    """Then it has been, and whoever was called looks at the record of it."""
    series, alerts = EVENTS[event]
    check(rules, QUIET | series, {29: set(), 31: alerts, 38: alerts, 50: set()})


def test_one_streams_policy_is_nothing_to_another(rules: Path) -> None:
    """Of two whose gaps are as old, that one is told whose policy has the lower threshold."""
    patient = {series.replace('"orders"', '"slow"'): values for series, values in QUIET.items() if STREAM in series}
    ages_of_both = {
        f'tidemark_oldest_gap_age_seconds{{{POD},stream="{stream}"}}': since(10, 100) for stream in ("orders", "slow")
    }
    own = {f'tidemark_policy_gap_seconds{{{POD},stream="slow"}}': always(90)}
    asked = 'group by (alertname, stream) (ALERTS{alertstate="firing"})'
    told = [{"labels": '{alertname="TidemarkGapOld",stream="slow"}', "value": 1}]
    wanted = {"expr": asked, "eval_time": "40m", "exp_samples": told}
    run_test(rules, QUIET | patient | ages_of_both | own, {"promql_expr_test": [wanted]})


def test_a_sidecar_that_sees_a_hole_tells(rules: Path) -> None:
    """What its sentinel counts is never above 0 while all keep the rules."""
    broken = {one("tidemark_sidecar_chain_errors_total"): since(30)}
    check(rules, QUIET | broken, {29: set(), 31: {"TidemarkSidecarChainBroken"}, 50: set()})


@pytest.mark.parametrize("event", EVENTS)
def test_the_first_event_of_a_counter_is_told(rules: Path, event: str) -> None:
    """The process began at minute 30, and its first scrape finds the event counted already."""
    series, alerts = EVENTS[event]
    first = {name: f"_x30 {always(1)}" for name in series}
    names = ("tidemark_started_timestamp_seconds", "tidemark_synapse_started_timestamp_seconds")
    began = {one(name): "_x30 1790+0x60" for name in names}
    check(rules, QUIET | first | began, {29: set(), 31: alerts, 50: set()})


@pytest.mark.parametrize("event", EVENTS)
def test_what_was_counted_long_ago_is_not_told_again_by_a_prometheus_that_was_away(rules: Path, event: str) -> None:
    """It asked nobody for half an hour."""
    away = {name: f"3+0x5 _x30 {always(3)}" for name in EVENTS[event][0]}
    check(rules, QUIET | away, {})


def test_texts_say_which_copy_stands_where(rules: Path) -> None:
    """Positions stand there digit by digit: nobody looks for 1.2M in a table."""
    found = [it for group in json.loads(rules.read_text()) for it in group["rules"]]
    [rule] = [it for it in found if it["alert"] == "TidemarkCopiesDiffer"]
    where = {"namespace": "streams", "stream": "orders", "copy": "sidecar", "pod": "tidemark-sidecar-0"}
    place = "Stream orders is at 1234567 in sidecar of tidemark-sidecar-0"
    summary = f"{place}; the pipeline was past this position five minutes ago"
    told = {"exp_labels": where | rule["labels"], "exp_annotations": rule["annotations"] | {"summary": summary}}
    test = {"eval_time": "40m", "alertname": "TidemarkCopiesDiffer", "exp_alerts": [told]}
    far = {one("tidemark_linear_position"): always(-1234600), IN_SIDECAR: always(-1234567)}
    run_test(rules, far, {"alert_rule_test": [test]})
