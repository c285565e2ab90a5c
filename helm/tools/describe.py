"""Write the generated files of the chart: `values.schema.json`, tables of its README, and two files for the templates.

`make chart-docs` runs this; tests/helm/test_described.py refuses a difference. The comment above a key is its
description. A line of it that begins with `@schema` is JSON, merged into the schema that the default gives. A line that
begins with `@format` names one of `FORMATS`. Templates check formats, and the schema does not: helm would print a
regular expression in place of a sentence.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml

from tidemark.app.connections import PREFIX
from tidemark.app.settings import FIELDS, SettingField, variable_of

CHART = Path(__file__).parents[1] / "tidemark"
SECTIONS = ("Alerts", "Values", "Settings that have a value")
"""Headings of the README that this module writes, in this order, to the end of the file."""
ALERTS = ("alerts.yaml", "relay-alerts.yaml", "synapse-alerts.yaml")
_SCHEMA, _FORMAT = "@schema ", "@format "
_LABEL = re.compile(r"{{ (?:\$labels\.)?\$?(\w+)[^}]*}}")
_TYPES = {
    "tag:yaml.org,2002:str": "string",
    "tag:yaml.org,2002:int": "integer",
    "tag:yaml.org,2002:bool": "boolean",
    "tag:yaml.org,2002:seq": "array",
    "tag:yaml.org,2002:map": "object",
}
_TEXTS = {"additionalProperties": {"type": "string"}}
_QUANTITIES = ("cpu", "memory", "ephemeral-storage", "scratchSize")

FORMATS: dict[str, tuple[str, str]] = {
    "brokers": (
        r"[^\s,/]+:([0-9]+|.*}})(,\s*[^\s,/]+:([0-9]+|.*}}))*",
        "host:port[,host:port ...], such as kafka:9092",
    ),
    "digest": (r"sha256:[0-9a-f]{64}", "sha256: and 64 hexadecimal digits"),
    "duration": (
        r"([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?",
        "a duration of Prometheus, such as 15s or 1m30s",
    ),
    "heap": (r"[1-9][0-9]*[kmgt]", "an amount of memory as Java writes it, such as 512m or 2g"),
    "listen": (r"[0-9.]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", "an IPv4 or IPv6 address, such as 0.0.0.0 or ::"),
    "prefix": (r"\S{1,100}", "at most 100 characters without white space"),
    "quantity": (
        r"[0-9]+(\.[0-9]+)?([eE][0-9]+|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?",
        "a quantity of Kubernetes, such as 500m, 2 or 3Gi",
    ),
    "redis": (
        r"((rediss?([+](sentinel|cluster))?|unix)://\S.*)",
        "a URL that begins with redis://, rediss://, redis+sentinel://, redis+cluster:// or unix://",
    ),
    "database": (r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?", "at most 30 lower-case letters, digits and hyphens"),
    "spark": (r"local|kubernetes|spark://.+", "local, kubernetes, or spark://host:7077"),
    "store": (r"[a-z][a-z0-9+.-]*:/.+", "a URI, such as s3a://bucket/tidemark"),
    "url": (r"https?://\S+", "a URL that begins with http:// or https://"),
    "writer": (r"\S{1,255}", "at most 255 characters without white space"),
}
"""Names of formats: a regular expression for the whole text, and the end of the sentence "... is not ..."."""

COMMON: dict[str, tuple[str, dict[str, Any]]] = {
    "affinity": ("Affinity of the pods.", {}),
    "annotations": ("Annotations of the object.", _TEXTS),
    "caSecret": ("Secret with the certificate of the authority that signed the server's certificate.", {}),
    "certificateKey": ("Key of the certificate in the Secret.", {}),
    "clientCertificateSecret": ("Secret with a client certificate (mTLS).", {}),
    "cpu": ("Cores.", {}),
    "digest": ("Digest of the image, sha256:..., which wins over the tag.", {}),
    "dnsConfig": ("dnsConfig of the pods: nameservers, searches, options.", {}),
    "dsnSecret": ("Secret with a whole connection string, password included.", {}),
    "enabled": ("Whether the chart installs it.", {}),
    "endpoint": ("More properties of each endpoint, such as {honorLabels: true}. They win over the chart's.", {}),
    "envFrom": ("More environment variables, from whole Secrets and ConfigMaps, as a container has them.", {}),
    "ephemeral-storage": ("Disk space.", {}),
    "extraContainers": ("More containers of the pods, as a pod has them.", {}),
    "extraEnv": ("More environment variables, as a container has them.", {}),
    "extraInitContainers": ("More init containers of the pods. They run before the chart's own.", {}),
    "extraVolumeMounts": ("Where the container mounts extraVolumes.", {}),
    "extraVolumes": ("More volumes of the pods, as a pod has them.", {}),
    "hostAliases": ("More entries of /etc/hosts in the pods: [{ip: 10.0.0.7, hostnames: [kafka-0]}].", {}),
    "hostUsers": ("false runs the pods in user namespaces of their own.", {}),
    "interval": ("Time between two scrapes.", {}),
    "key": ("Key in the Secret.", {}),
    "keyKey": ("Key of the private key in the Secret.", {}),
    "labels": ("Labels of the object.", _TEXTS),
    "limits": ("Upper limits of the container.", {}),
    "memory": ("Memory.", {}),
    "name": ("Name of the Secret. Empty: none.", {}),
    "namespace": ("Namespace of the object. Empty: the release's.", {}),
    "nodeSelector": ("Labels of the nodes that may run the pods.", _TEXTS),
    "passwordSecret": ("Secret with the password. It is read again after a rotation.", {}),
    "podAnnotations": ("Annotations of the pods.", _TEXTS),
    "podLabels": ("Labels of the pods.", _TEXTS),
    "priorityClassName": ("Priority class of the pods. Empty: the cluster's default.", {}),
    "registry": ("Registry of the image, such as registry.example. global.imageRegistry wins over it.", {}),
    "repository": ("Name of the image in the registry.", {}),
    "requests": ("What the scheduler reserves for the container.", {}),
    "resources": ("Resources of the container.", {}),
    "runtimeClassName": ("Runtime class of the pods. Empty: the cluster's default.", {}),
    "scrapeTimeout": ("Time after which a scrape fails. Empty: Prometheus's default.", {}),
    "tag": ("Tag of the image. Empty: the chart's appVersion.", {}),
    "tls": ("TLS of the connection.", {}),
    "tolerations": ("Tolerations of the pods.", {}),
    "scratchSize": ("Size limit of the volume.", {}),
}
"""Description and schema of keys that have the same meaning in every place. A comment replaces the description."""


@dataclass(frozen=True, slots=True)
class Value:
    """One key. `default` is as it is written; `below` holds the keys of an object that has some."""

    name: str
    kind: str
    default: str
    description: str
    annotations: dict[str, Any]
    below: tuple["Value", ...]
    format: str = ""

    def schema(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"type": self.kind}
        if self.format == "quantity":
            shape["type"] = ["string", "number"]
        if self.below:
            shape |= _object(self.below)
        if self.description:
            shape["description"] = self.description
        return shape | self.annotations

    def rows(self, prefix: str = "") -> Iterator[str]:
        path = f"{prefix}{self.name}"
        kind = self.schema()["type"]
        kinds = " or ".join(kind) if isinstance(kind, list) else kind
        shown = "" if self.below else f"`{self.default}`"
        yield f"| `{path}` | {kinds} | {shown} | {self.description.replace('|', '&#124;')} |"
        for value in self.below:
            yield from value.rows(f"{path}.")

    def formats(self, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Paths that have a format, with its name."""
        path = f"{prefix}{self.name}"
        if self.format:
            yield path, self.format
        for value in self.below:
            yield from value.formats(f"{path}.")


def read(text: str) -> tuple[Value, ...]:
    """The keys of the document, in its order. Raises ValueError for a key without a type."""
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    return _mapping(root, text.splitlines())


def schema(values: tuple[Value, ...]) -> str:
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart tidemark",
        "type": "object",
        **_object(values),
    }
    # A chart that depends on this one may have the condition `tidemark.enabled`.
    document["properties"] |= {"enabled": {"type": "boolean"}}
    return json.dumps(document, indent=2) + "\n"


def formats(values: tuple[Value, ...]) -> str:
    """For the templates: the pattern of each value that has a format, and the words for it."""
    named = {path: name for value in values for path, name in value.formats()}
    entries = {
        path: {"pattern": f"^({FORMATS[name][0]})?$", "expected": FORMATS[name][1]} for path, name in named.items()
    }
    return json.dumps(entries, indent=2) + "\n"


def settings() -> str:
    """For the templates: what each setting accepts, for the check of the value `settings`."""
    accepted = {
        variable_of(name).removeprefix(PREFIX): _accepted(field)
        for name, field in FIELDS.items()
        if variable_of(name).startswith(PREFIX)
    }
    return json.dumps(dict(sorted(accepted.items())), indent=2) + "\n"


_JSON_TYPES = {bool: "boolean", int: "integer", float: "number"}


def _accepted(field: SettingField) -> dict[str, Any]:
    """The part of a setting's limits that a template can check, in the terms of JSON Schema."""
    limits = [item for item in field.metadata if isinstance(item, msgspec.Meta)]
    bounds = {"minimum": [item.ge for item in limits], "maximum": [item.le for item in limits]}
    numbers = {key: value for key, values in bounds.items() for value in values if value is not None}
    choices = {"enum": list(get_args(field.kind))} if get_args(field.kind) else {}
    return {"type": _JSON_TYPES.get(field.kind, "string")} | numbers | choices


def alerts(files: Path) -> Iterator[str]:
    """One row of the table for each alert. Templates of Prometheus become the name of their label."""
    for name in ALERTS:
        document = yaml.safe_load((files / name).read_text())
        for group in document["groups"] if isinstance(document, dict) else document:
            for rule in group["rules"]:
                texts = rule["annotations"]
                summary = _LABEL.sub(r"*\1*", texts["summary"])
                yield f"| {rule['alert']} | {rule['labels']['severity']} | {summary} | `{texts['command']}` |"


def readme(prose: str, values: tuple[Value, ...], files: Path) -> str:
    """`prose` with the sections of `SECTIONS` written again."""
    above, heading, _ = prose.partition(f"## {SECTIONS[0]}\n")
    if not heading:
        raise ValueError(f"the README has no heading {SECTIONS[0]!r}")
    names = json.loads((files / "names.json").read_text())
    tables = {
        "Alerts": [
            "Each alert says what to do, and names a command to type first.",
            "",
            "| alert | severity | summary | first command |",
            "|---|---|---|---|",
            *alerts(files),
        ],
        "Values": [
            "| value | type | default | description |",
            "|---|---|---|---|",
            *(row for value in values for row in value.rows()),
        ],
        "Settings that have a value": [
            "Log messages name settings. These settings have a value of the chart, and `settings` refuses them.",
            "",
            "| setting | value |",
            "|---|---|",
            *(f"| `{PREFIX}{name}` | `{value}` |" for name, value in sorted(names.items())),
        ],
    }
    sections = ["\n".join([f"## {title}", "", *tables[title], ""]) for title in SECTIONS]
    return above + "\n".join(sections)


def _object(values: tuple[Value, ...]) -> dict[str, Any]:
    return {"properties": {value.name: value.schema() for value in values}, "additionalProperties": False}


def _mapping(node: yaml.MappingNode, lines: list[str]) -> tuple[Value, ...]:
    return tuple(_value(key, value, lines) for key, value in node.value)


def _value(key: yaml.ScalarNode, value: yaml.Node, lines: list[str]) -> Value:
    if value.tag not in _TYPES:
        raise ValueError(f"values.yaml, line {key.start_mark.line + 1}: {key.value} has no default with a type")
    description, annotations, format_name = _comment(key, lines)
    common_description, common_annotations = COMMON.get(key.value, ("", {}))
    below = _mapping(value, lines) if isinstance(value, yaml.MappingNode) and not value.flow_style else ()
    if isinstance(value, yaml.MappingNode) and not value.value:
        annotations = common_annotations | annotations
    if not format_name and key.value in _QUANTITIES and not below and _TYPES[value.tag] == "string":
        format_name = "quantity"
    written = lines[value.start_mark.line][value.start_mark.column :] if not below else ""
    return Value(
        key.value, _TYPES[value.tag], written, description or common_description, annotations, below, format_name
    )


def _comment(key: yaml.ScalarNode, lines: list[str]) -> tuple[str, dict[str, Any], str]:
    """The description above a key, its part of the schema, and the name of its format."""
    first = key.start_mark.line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    words: list[str] = []
    annotations: dict[str, Any] = {}
    format_name = ""
    for line in lines[first : key.start_mark.line]:
        text = line.strip().removeprefix("#").strip()
        if text.startswith(_SCHEMA):
            annotations |= json.loads(text.removeprefix(_SCHEMA))
        elif text.startswith(_FORMAT):
            format_name = text.removeprefix(_FORMAT)
            if format_name not in FORMATS:
                raise ValueError(f"values.yaml, line {key.start_mark.line}: there is no format {format_name}")
        else:
            words.append(text)
    return " ".join(words), annotations, format_name


def described(chart: Path) -> dict[Path, str]:
    """What each generated file should hold."""
    values = read((chart / "values.yaml").read_text())
    prose = chart / "README.md"
    return {
        chart / "values.schema.json": schema(values),
        chart / "files/formats.json": formats(values),
        chart / "files/settings.json": settings(),
        prose: readme(prose.read_text(), values, chart / "files"),
    }


if __name__ == "__main__":
    for path, text in described(CHART).items():
        path.write_text(text)
