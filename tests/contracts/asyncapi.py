"""The AsyncAPI document of Kafka topics, Redis channels and server-sent events, made from the code that serves them.

Payloads come from the types that decode or encode them. Names and addresses come from the settings' defaults and from
`sinks.redis.names`.
"""

import inspect
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final, get_args
from urllib.parse import urlsplit

import msgspec

from tests.contracts.record_schemas import Schema, schemas
from tidemark.app.settings import FIELDS, variable_of
from tidemark.app.sidecar import answers, events
from tidemark.app.sidecar.answers import StreamAnswer
from tidemark.app.sidecar.event_stream import EVENT_STREAM
from tidemark.app.sidecar.watch import PipelineAnswer, WatchedStreamAnswer
from tidemark.sinks import dead_letters
from tidemark.sinks.positions_topic import FENCE_HEADER, PositionRecord
from tidemark.sinks.redis import client
from tidemark.streaming.values.limits import Reason
from tidemark.streaming.wire.line_protocol import RELAYED_COMMANDS, PositionCommand, RdataCommand, ReplicateCommand
from tidemark.streaming.wire.records import MAX_NAME_LENGTH, RecordName, Topic

SCHEMAS: Final = "#/components/schemas/"
SUFFIX: Final = "Answer"  # of our types, which public names leave out
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
EVENTS: Final = {
    "/v1/events": {"snapshot": StreamAnswer, **{str(it.__struct_config__.tag): it for it in get_args(answers.Move)}}
    | {str(answers.LinearMoveAnswer.__struct_config__.tag): answers.LinearMoveAnswer},
    "/v1/watch": {str(it.__struct_config__.tag): it for it in (WatchedStreamAnswer, PipelineAnswer)},
}
"""Path to event name to the type of its data. A snapshot is the answer of /v1/streams/{stream}."""

POSITIONS_TOPIC: Final = "tidemark.positions"
_ID: Final = r"-?[0-9]{1,19}"


def document() -> dict[str, Any]:
    """An AsyncAPI 3.0 document, from the point of view of Tidemark: it receives facts and sends positions."""
    channels = {**_topics(), **_redis(), **_events()}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Tidemark",
            "version": version("tidemark-streams"),
            "description": "Kafka topics, Redis channels and server-sent events of Tidemark. Tidemark is the"
            " application: it receives facts and sends positions. Addresses are the defaults of the settings.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": JSON,
        "servers": {
            "kafka": {"host": _default("kafka_bootstrap_servers"), "protocol": "kafka"},
            "redis": {"host": urlsplit(_default("redis_url").get_secret_value()).netloc, "protocol": "redis"},
            "sidecar": {"host": f"{_default('sidecar_host')}:{_default('sidecar_port')}", "protocol": "http"},
        },
        "channels": channels,
        "operations": {
            name: {"action": "receive" if name in _RECEIVED else "send", "channel": {"$ref": f"#/channels/{name}"}}
            for name in channels
        },
        "components": {"schemas": _components()},
    }


_RECEIVED: Final = {Topic.FACTS.value, Topic.CONTROL.value}


def _default(name: str) -> Any:
    return FIELDS[name].default


def _topics() -> dict[str, Any]:
    key = msgspec.json.schema(RecordName) | {"description": "The name of the stream."}
    found: dict[str, Any] = {}
    for topic, purpose in (
        (Topic.FACTS, "What writers report. One message of the kind RUN carries many facts."),
        (Topic.CONTROL, "Operator overrides. Only operators have the right to write."),
    ):
        found[topic.value] = {
            "address": _default(f"kafka_{topic.value}_topic"),
            "description": purpose,
            "servers": [{"$ref": "#/servers/kafka"}],
            "messages": {
                kind: {
                    "name": kind,
                    "contentType": JSON,
                    "payload": {"$ref": f"{SCHEMAS}{_record_name(topic, kind)}"},
                    "bindings": {"kafka": {"key": key, "bindingVersion": "0.5.0"}},
                }
                for kind in schemas(topic)
                if kind.isupper()
            },
        }
    found["deadLetters"] = {
        "address": _default("kafka_dead_letters_topic"),
        "description": "Records that the pipeline refused, byte for byte, at least once.",
        "servers": [{"$ref": "#/servers/kafka"}],
        "messages": {
            "deadLetter": {
                "contentType": "application/octet-stream",
                "description": "Key, value and headers are those of the refused record. These headers follow them.",
                "headers": _dead_letter_headers(),
                "payload": {"description": "The bytes of the refused record; empty if they are gone."},
            }
        },
    }
    found["positionsTopic"] = {
        "address": POSITIONS_TOPIC,
        "description": f"Compacted; published if {variable_of('kafka_positions_topic')} names it. The newest record"
        " of a key is the position of the stream. After a record without a value the position follows again.",
        "servers": [{"$ref": "#/servers/kafka"}],
        "messages": {
            "streamPosition": {
                "contentType": JSON,
                "headers": {
                    "type": "object",
                    "properties": {
                        FENCE_HEADER: {
                            "type": "string",
                            "pattern": "^[0-9]+$",
                            "description": "Fencing token of the pipeline that wrote the record.",
                        }
                    },
                    "required": [FENCE_HEADER],
                },
                "payload": {"$ref": f"{SCHEMAS}{PositionRecord.__name__}"},
                "bindings": {"kafka": {"key": key, "bindingVersion": "0.5.0"}},
            }
        },
    }
    return found


def _record_name(topic: Topic, kind: str) -> str:
    return f"{topic.value}-{kind}"


def _dead_letter_headers() -> Schema:
    written = [name for name, _ in dead_letters._tidemark_headers("", "", 0, 0)]
    described: dict[str, Schema] = {
        "reason": {"enum": [str(reason) for reason in Reason], "description": "Why the record was refused."},
        "topic": {"type": "string", "description": "The topic of the refused record."},
        "partition": {"type": "string", "pattern": "^[0-9]+$", "description": "Its partition."},
        "offset": {"type": "string", "pattern": "^[0-9]+$", "description": "Its offset."},
    }
    return {
        "type": "object",
        "properties": {name: described[name] for name in written}
        | {
            "detail": {
                "type": "string",
                "maxLength": dead_letters.MAX_DETAIL_LENGTH,
                "description": "What is wrong with the record, for people.",
            },
            "gone": {"type": "string", "description": "Why there is no value."},
        },
        "required": written,
    }


def _redis() -> dict[str, Any]:
    relayed = [f"{word} {form.pattern}" for word, form in RELAYED_COMMANDS.items()]
    lines = {
        "position": _line("POSITION", str(PositionCommand("orders", "shop", 3, 4)), f"{_name()} {_name()} {_ID} {_ID}"),
        "rdata": _line("RDATA", str(RdataCommand("orders", "shop", 4, "{}")), f"{_name()} {_name()} (batch|{_ID}) .*"),
        "replicate": _line(str(ReplicateCommand()), str(ReplicateCommand())),
        "relayed": {
            "name": "relayed",
            "contentType": TEXT,
            "description": "A command that clients of sidecars send to each other. Sidecars carry it unchanged.",
            "payload": {"type": "string", "pattern": f"^({'|'.join(relayed)})$"},
        },
    }
    server = [{"$ref": "#/servers/redis"}]
    return {
        "positions": {
            "address": client.channel("{stream}").replace(client.hash_tag("{stream}"), "{tag}"),
            "title": "Moves of one stream",
            "description": "A message is a wake-up and never moves a position: read the stream's keys. In a database"
            " other than 0 the name ends with `/` and the number of the database.",
            "servers": server,
            "parameters": {
                "tag": {
                    "description": "The name of the stream in braces. In the name, `{` is written `{<` and `}` is"
                    " written `{>`.",
                    "examples": [client.hash_tag("orders")],
                }
            },
            "messages": {"position": lines["position"]},
        },
        "sidecars": {
            "address": client.lines_channel("{name}"),
            "title": "Sidecars with one name",
            "description": "Sidecars that have no channel of the line protocol pass relayed commands on to each other.",
            "servers": server,
            "parameters": {
                "name": {"description": variable_of("lines_server_name"), "default": _default("lines_server_name")}
            },
            "messages": {"relayed": lines["relayed"]},
        },
        "lines": {
            "address": None,
            "title": "Line protocol on a channel",
            "description": f"The channel that {variable_of('lines_redis_channel')} names. Without that setting there is"
            " none. In a database other than 0 the name ends with `/` and the number of the database.",
            "servers": server,
            "messages": lines,
        },
    }


def _name() -> str:
    """A name of a stream or a writer, as part of a pattern."""
    forbidden = msgspec.json.schema(RecordName)["not"]["pattern"]
    return f"[^{forbidden[1:]}{{1,{MAX_NAME_LENGTH}}}"


def _line(word: str, example: str, words: str = "") -> Schema:
    return {
        "name": word,
        "contentType": TEXT,
        "payload": {"type": "string", "pattern": f"^{word} {words}$" if words else f"^{word}$", "examples": [example]},
    }


def _events() -> dict[str, Any]:
    by_path = {operation.path: operation for operation in events.OPERATIONS}
    return {
        by_path[path].name: {
            "address": path,
            "description": by_path[path].summary,
            "servers": [{"$ref": "#/servers/sidecar"}],
            "messages": {
                name: {
                    "name": name,
                    "contentType": JSON,
                    "headers": {
                        "type": "object",
                        "description": "The fields of the event. The payload is its `data`.",
                        "properties": {
                            "event": {"const": name},
                            "id": {"type": "string", "description": "Send as Last-Event-ID to go on after it."},
                        },
                        "required": ["event"],
                    },
                    "payload": {"$ref": f"{SCHEMAS}{type_.__name__.removesuffix(SUFFIX)}"},
                }
                for name, type_ in types.items()
            },
            "bindings": {"http": {}},
            "x-media-type": EVENT_STREAM,
        }
        for path, types in EVENTS.items()
    }


def _components() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for topic in Topic:
        for kind, schema in schemas(topic, f"{SCHEMAS}{topic.value}-").items():
            found[_record_name(topic, kind)] = schema
    types: Sequence[type[msgspec.Struct]] = [
        PositionRecord,
        *(it for of_path in EVENTS.values() for it in of_path.values()),
    ]
    _, components = msgspec.json.schema_components(types, ref_template=SCHEMAS + "{name}")
    return found | {name.removesuffix(SUFFIX): _published(schema) for name, schema in components.items()}


def _published(schema: Any) -> Any:
    """A schema with public names: those of our types without `SUFFIX`."""
    match schema:
        case Mapping():
            return {key: _text(key, value) for key, value in schema.items()}
        case list():
            return [_published(item) for item in schema]
    return schema


def _text(key: str, value: Any) -> Any:
    if isinstance(value, str) and key in {"title", "$ref"}:
        return value.removesuffix(SUFFIX)
    if isinstance(value, str) and key == "description":
        return inspect.cleandoc(value)  # as Python 3.13 does by itself
    return _published(value)
