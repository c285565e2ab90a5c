"""JSON Schema of what each verb prints with `--json`, made from the types that it prints.

A verb that puts its object together from parts has a struct here. The tests of the verbs check its fields: a fixture
compares all that they print with these schemas.
"""

import inspect
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Annotated, Any, Final, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tests.contracts.record_schemas import DRAFT, REFERENCE, Schema
from tidemark.app.diagnosis.open_ranges import LagCauseAnswer, OpenRange
from tidemark.app.diagnosis.reader_lag import ReaderStatus
from tidemark.app.relay import RelayMigrationResult, Retirement
from tidemark.app.settings import EffectiveSetting, UnknownVariable
from tidemark.app.verbs.doctor import Check
from tidemark.app.verbs.explain import Explanation
from tidemark.app.verbs.kafka_records import RecordedLine
from tidemark.app.verbs.overrides import Outcome
from tidemark.app.verbs.replay import Divergence, ReplayReport
from tidemark.app.verbs.reseed import Reseed
from tidemark.app.verbs.status import WriterStatus
from tidemark.app.verbs.trace import IdTrace
from tidemark.app.verbs.verify import Difference
from tidemark.sinks.postgres.inspect import StoredLateCompletion
from tidemark.sinks.postgres.operators import OverrideEntry
from tidemark.sinks.postgres.status import BridgeStatus, HistoryFault, LaggingPartition
from tidemark.sinks.reader import ParkedFact
from tidemark.sources.transactions import OpenTransaction
from tidemark.streaming.core.effects import WriterAdvance

Age = Annotated[float, Meta(ge=0, description="Seconds.")]


def _changed(base: type, **changes: Any) -> Any:
    """A struct with the fields of a dataclass or a struct, in which some are new or of another type."""
    own = fields(base) if is_dataclass(base) else msgspec.structs.fields(base)
    hints = get_type_hints(base, include_extras=True)
    types = {field.name: hints[field.name] for field in own} | changes
    return msgspec.defstruct(base.__name__, [*types.items()], kw_only=True, namespace={"__doc__": base.__doc__})


class PipelineOutput(msgspec.Struct):
    """Who computes positions, and whether positions are up to date."""

    owner: Annotated[str | None, Meta(description="The process that has the lease, or had it last.")]
    lease_seconds: Annotated[float, Meta(description="Seconds until the lease ends; 0: nobody has it.")]
    last_batch_seconds: Annotated[Age | None, Meta(description="Seconds since a batch was applied.")]
    records_waiting: Annotated[int | None, Meta(description="Kafka lag in records; null if it is not known.")]
    lagging_partitions: list[LaggingPartition]
    problems: Annotated[list[str], Meta(description="For people; empty if all is well.")]


class OldestGapOutput(msgspec.Struct):
    """The gap that has been open longest. A writer that never joined has no `low` and no `top`."""

    writer: str
    epoch: int
    low: int | None
    top: int | None
    unknown: bool
    age_seconds: Age


class LinearLagOutput(msgspec.Struct):
    """How far the linear position is below the highest ID that is allocated, and which writers block it."""

    ids: int
    since: datetime | None
    blockers: list[_changed(LagCauseAnswer, age_seconds=Age | None)]  # type: ignore[valid-type]
    blocker_count: int
    age_seconds: Age | None


class RequeuedOutput(msgspec.Struct):
    """Deferred records of one writer that the pipeline reads again."""

    writer: str
    since: datetime
    gone: int
    problem: str | None


class SinkFaultOutput(msgspec.Struct):
    """A sink that cannot show this stream."""

    sink: str
    since: datetime
    problem: str


class SourceOutput(msgspec.Struct):
    """A writer that reports itself, as relays and bridges do."""

    writer: str
    heartbeat_seconds: int | None
    last_seen: datetime | None
    blocked: Annotated[str | None, Meta(description="Why it holds its facts back.")]
    problem: Annotated[str | None, Meta(description="What is wrong with it, for people.")]


class StreamOutput(msgspec.Struct):
    stream: str
    linear: int
    writers: list[WriterStatus]
    pending: int
    unknown_writers: list[str]
    oldest_gap: OldestGapOutput | None
    linear_lag: LinearLagOutput | None
    open_transactions: dict[str, list[str]]
    deferred: list[str]
    requeued: list[RequeuedOutput]
    bridge: BridgeStatus | None
    sources: list[SourceOutput]
    not_shown: list[SinkFaultOutput]


class StatusOutput(msgspec.Struct):
    pipeline: PipelineOutput
    streams: list[StreamOutput]


class GapsOutput(msgspec.Struct):
    gaps: list[OpenRange]


class TopOutput(StatusOutput):
    gaps: list[OpenRange]


class BundleOutput(msgspec.Struct):
    file: str
    parts: list[str]
    problems: Annotated[dict[str, str], Meta(description="Part that is missing to reason.")]


class LineOutput(msgspec.Struct):
    """One command of the line protocol. `command` is its word; which fields follow depends on the command."""

    command: str
    stream: str | UnsetType = UNSET
    writer: str | UnsetType = UNSET
    prev: int | UnsetType = UNSET
    id: int | UnsetType | None = UNSET
    row: msgspec.Raw | UnsetType = UNSET
    text: str | UnsetType = UNSET


class SentOutput(msgspec.Struct):
    """Position of the record in Kafka."""

    topic: str
    partition: int
    offset: int


class LinearMoveOutput(msgspec.Struct, rename={"before": "from", "after": "to"}):
    before: int
    after: int


ControlRecord = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "urn:tidemark:schema:control-record"})]


class OverrideOutput(msgspec.Struct):
    """`sent` and all that follows are null if nothing was sent."""

    act: ControlRecord
    would: Annotated[list[str], Meta(description="What the override changes, for people.")]
    advances: list[_changed(WriterAdvance)]  # type: ignore[valid-type]
    linear: LinearMoveOutput
    warnings: list[str]
    objections: Annotated[list[str], Meta(description="Reasons that need --force.")]
    sent: SentOutput | None
    number: Annotated[int | None, Meta(description="Number in `tidemark overrides`.")]
    seen_as: Annotated[str | None, Meta(description="The user that Postgres knew.")]
    outcome: Outcome | None
    result: str | None


class OverridesOutput(msgspec.Struct):
    overrides: list[OverrideEntry]


class DeadLetterOutput(msgspec.Struct, kw_only=True):
    """`key` and `value` are text. Bytes that are not UTF-8 are in `key_base64` and `value_base64` instead."""

    partition: int
    offset: int
    time: Annotated[float, Meta(description="Seconds since 1970.")]
    reason: str
    detail: str | None
    gone: Annotated[str | None, Meta(description="Why there is no value.")]
    stream: str
    record: SentOutput
    replay_override: int | None
    key: str | None
    value: str | None
    key_base64: str | UnsetType = UNSET
    value_base64: str | UnsetType = UNSET
    headers: list[tuple[str, str]]


class DeadLettersOutput(msgspec.Struct):
    dead_letters: list[DeadLetterOutput]


class DeadLetterReplayOutput(msgspec.Struct):
    """With --dry-run only `would` and `outcome`."""

    would: list[str]
    outcome: Outcome | None
    sent: SentOutput | UnsetType = UNSET
    number: int | UnsetType = UNSET
    seen_as: str | UnsetType = UNSET
    result: str | UnsetType = UNSET


class VerifyOutput(msgspec.Struct):
    is_equal: bool
    streams: int
    copies: list[str]
    advances: Annotated[int | None, Meta(description="Advances that were read; null without --history.")]
    differences: list[Difference]
    history: list[HistoryFault]


class ExplainOutput(msgspec.Struct):
    stays: list[Explanation]
    readers: list[ReaderStatus] | UnsetType = UNSET


class WaitOutput(msgspec.Struct):
    stream: str
    linear: int
    vector: dict[str, int]
    token: str


class PoliciesOutput(msgspec.Struct):
    policies: Annotated[dict[str, dict[str, int]], Meta(description="Policy to setting to value.")]


class PolicySettingOutput(msgspec.Struct):
    value: int | None
    policy: Annotated[str | None, Meta(description="The policy that has this value; null: the default.")]


class PolicyOutput(msgspec.Struct):
    stream: str
    settings: dict[str, PolicySettingOutput]


class DoctorOutput(msgspec.Struct):
    ok: Annotated[bool, Meta(description="No check failed.")]
    checks: list[Check]


class ReadersOutput(msgspec.Struct):
    readers: list[ReaderStatus]


class ParkedOutput(msgspec.Struct):
    parked: list[ParkedFact]


class ReaderChangeOutput(msgspec.Struct):
    reader: str
    stream: str
    would: Annotated[str, Meta(description="What the command does, for people.")]
    ids: Annotated[list[int], Meta(description="The parked facts that it is about.")]
    dry_run: bool
    number: Annotated[int | None, Meta(description="Number in `tidemark overrides`; null: nothing was done.")]


class PolicyChangeOutput(msgspec.Struct):
    policy: str
    changes: Annotated[dict[str, int | None], Meta(description="Setting to new value; null: removed.")]
    streams: Annotated[list[str], Meta(description="Streams that the policy fits.")]
    dry_run: bool
    act: int | None


class LateOutput(msgspec.Struct):
    late: list[StoredLateCompletion]


class ConfigOutput(msgspec.Struct):
    settings: Annotated[
        list[EffectiveSetting], Meta(description="Secrets are masked; a value that is not set is null.")
    ]
    unknown: list[UnknownVariable]


class MigrateOutput(msgspec.Struct):
    applied: Annotated[list[int], Meta(description="Versions that were applied now.")]


class FollowMigrateOutput(msgspec.Struct):
    installed: Annotated[bool, Meta(description="Whether anything had to change.")]


class TopicOutput(msgspec.Struct):
    topic: str
    partitions: int


class TopicsOutput(msgspec.Struct):
    topics: list[TopicOutput]


class PlaceOutput(msgspec.Struct):
    partition: int
    offset: int


class ProduceOutput(msgspec.Struct):
    topic: str
    sent: int
    refused: Annotated[int, Meta(description="Invalid lines, which were not sent.")]
    last: Annotated[PlaceOutput | None, Meta(description="The record that was acknowledged last.")]


class RetireOutput(msgspec.Struct):
    writer: str
    retired: Annotated[list[Retirement], Meta(description="The ID of each stream at which the writer retires.")]


class SynapseBlockerOutput(msgspec.Struct):
    """An open transaction that writes to tables of Synapse's streams. A prepared transaction has no `pid`."""

    streams: list[str]
    pid: int | None
    gid: str | None
    user: str
    application: str
    state: str
    since: datetime | None
    query: str
    database: str
    ending_statement: str


class BlockersOutput(msgspec.Struct):
    blockers: list[_changed(OpenTransaction, ending_statement=str)]  # type: ignore[valid-type]


class SynapseBlockersOutput(msgspec.Struct):
    blockers: list[SynapseBlockerOutput]


_PARTING: Final = _changed(Divergence, record=RecordedLine | None)

OUTPUTS: Final[dict[str, Any]] = {
    "bundle": BundleOutput,
    "config": ConfigOutput,
    "dead-letters list": DeadLettersOutput,
    "dead-letters replay": DeadLetterReplayOutput,
    "dead-letters show": DeadLetterOutput,
    "doctor": DoctorOutput,
    "explain": ExplainOutput,
    "fence": OverrideOutput,
    "follow migrate": FollowMigrateOutput,
    "gaps": GapsOutput,
    "join": OverrideOutput,
    "late list": LateOutput,
    "late resolve": LateOutput,
    "listen": LineOutput,
    "migrate": MigrateOutput,
    "overrides list": OverridesOutput,
    "overrides show": OverrideEntry,
    "policy list": PoliciesOutput,
    "policy set": PolicyChangeOutput,
    "policy show": PolicyOutput,
    "policy unset": PolicyChangeOutput,
    "produce": ProduceOutput,
    "readers delete": ReaderChangeOutput,
    "readers list": ReadersOutput,
    "readers parked drop": ReaderChangeOutput,
    "readers parked list": ParkedOutput,
    "readers parked retry": ReaderChangeOutput,
    "readers reset": ReaderChangeOutput,
    "readers seek": ReaderChangeOutput,
    "readers show": ReadersOutput,
    "relay blockers": BlockersOutput,
    "relay migrate": RelayMigrationResult,
    "relay retire": RetireOutput,
    "replay": _changed(ReplayReport, parted=list[_PARTING]),  # type: ignore[valid-type]
    "reseed": _changed(Reseed, dry_run=bool),
    "retire": OverrideOutput,
    "skip": OverrideOutput,
    "status": StatusOutput,
    "synapse blockers": SynapseBlockersOutput,
    "synapse migrate": MigrateOutput,
    "synapse retire": RetireOutput,
    "tail": RecordedLine,
    "top": TopOutput,
    "topics": TopicsOutput,
    "trace": _changed(IdTrace, dead_letters=list[DeadLetterOutput]),
    "verify": VerifyOutput,
    "wait": WaitOutput,
}
"""Words of a verb to the type of the object that it prints."""

PER_LINE: Final = ("listen", "tail", "top")
"""Verbs that print many objects, one on each line. All others print one."""


def document(verb: str) -> Schema:
    """The schema of one object that `tidemark VERB --json` prints."""
    (schema,), components = msgspec.json.schema_components([OUTPUTS[verb]], ref_template=REFERENCE + "{name}")
    how = "One line" if verb in PER_LINE else "The object"
    return {
        "$schema": DRAFT,
        "$id": f"urn:tidemark:schema:cli:{verb.replace(' ', '-')}",
        "title": f"tidemark {verb} --json",
        "description": f"{how} that `tidemark {verb} --json` prints. Later versions may add fields.",
        **schema,
        "$defs": {name: _described(part) for name, part in components.items()},
    }


def _described(schema: Schema) -> Schema:
    """Without the titles, and without descriptions that msgspec makes of types that have no docstring."""
    description = inspect.cleandoc(schema.get("description", ""))
    plain = {key: value for key, value in schema.items() if key not in {"title", "description"}}
    return plain | ({"description": description} if description and "(" not in description[:40] else {})
