"""Descriptions of the operations of the HTTP interface, and `/openapi.json`, which is generated from them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidemark.app.sidecar import answers
from tidemark.app.sidecar.answers import PROBLEM_MEDIA_TYPE, BadRequest, Problem, Unauthorized, urn
from tidemark.app.sidecar.service import Service

JSON_MEDIA_TYPE = "application/json"


class NoQuery(msgspec.Struct, frozen=True):
    """The query of an operation without query parameters."""


@dataclass(frozen=True, slots=True)
class OperationCall:
    """A checked request.

    `stream`: the stream in the path, or empty. `query`: the query parameters, decoded to the type `Operation.query`.
    """

    service: Service
    request: Request
    stream: str
    query: Any

    @property
    def address(self) -> str:
        """The IP address of the client; empty if it is not known. Behind a trusted proxy, the address that the proxy
        reports."""
        return self.request.client.host if self.request.client else ""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the HTTP interface.

    Attributes:
        path: the path, with `{stream}` for the name of a stream.
        name: the `operationId`.
        summary: the public description.
        handle: answers a request.
        answer: the type of a 200 answer.
        query: the type of the query parameters.
        media_type: the media type of a 200 answer.
        problems: the errors in the public description, at most one for each status.
        headers: the optional request headers.
        other_answers: status -> the types of other answers that are not errors.
    """

    path: str
    name: str
    summary: str
    handle: Callable[[OperationCall], Awaitable[Response]]
    answer: Any
    query: type[msgspec.Struct] = NoQuery
    media_type: str = JSON_MEDIA_TYPE
    problems: Sequence[type[Problem]] = ()
    headers: Sequence[str] = ()
    other_answers: Mapping[int, Any] = field(default_factory=dict)

    @property
    def needs_token(self) -> bool:
        """Whether a request needs a bearer token, if the sidecar has a file of tokens."""
        return self.path.startswith("/v1/") or self.path == "/metrics"

    @property
    def has_etag(self) -> bool:
        return "If-None-Match" in self.headers


def parse_query(query: type[msgspec.Struct], parameters: Sequence[tuple[str, str]]) -> msgspec.Struct:
    """Convert query parameters, (name, text) pairs, to an instance of `query`. A parameter whose type is a list gets
    all values of its name; any other parameter gets the last value. Unknown parameters are ignored.

    Raises:
        BadRequest: a parameter is missing or invalid.
    """
    texts_by_name: dict[str, list[str]] = {}
    for name, text in parameters:
        texts_by_name.setdefault(name, []).append(text)
    lists = _list_parameters(query)
    values = {name: texts if name in lists else texts[-1] for name, texts in texts_by_name.items()}
    try:
        return msgspec.convert(values, query, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from None


@cache
def _list_parameters(query: type[msgspec.Struct]) -> frozenset[str]:
    """The names of parameters that may be repeated."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(query) if "list" in str(field.type))


def json_response(body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, dict(headers or {}), JSON_MEDIA_TYPE)


def etag_response(request: Request, body: msgspec.Struct, etag: str) -> Response:
    """The response with `body` and its ETag, or 304 without a body if the client's `If-None-Match` contains `etag` or
    `*`."""
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    known_etags = [text.strip() for text in request.headers.get("if-none-match", "").split(",")]
    if etag in known_etags or "*" in known_etags:
        return Response(status_code=304, headers=headers)
    return json_response(body, headers=headers)


SCHEMA_PREFIX = "#/components/schemas/"
ANSWER_SUFFIX = "Answer"  # removed from the names of our types
NAME_PATTERN = r"^[^\s\x00-\x1f\x7f-\x9f]{1,255}$"
HEADER_DESCRIPTIONS = {
    "If-None-Match": "The ETag of the client's last answer. The answer is 304 if nothing has changed, except ages.",
    "Last-Event-ID": "The `id` of the last event that the client received: continue after it.",
}
OPENAPI_PATH = "/openapi.json"
BEARER: Mapping[str, Any] = {"token": {"type": "http", "scheme": "bearer"}}


def create_openapi_operation(operations: Sequence[Operation], security_schemes: Mapping[str, Any]) -> Operation:
    """Create the operation that answers with the OpenAPI document. The document describes `operations`, and this
    operation too.

    Args:
        operations: all other operations.
        security_schemes: `BEARER`, or empty if requests need no token.
    """

    async def describe(_: OperationCall) -> Response:
        return Response(text, media_type=JSON_MEDIA_TYPE)

    itself = Operation(OPENAPI_PATH, "openapi", "This document.", describe, dict[str, Any])
    text = msgspec.json.encode(create_openapi_document([*operations, itself], security_schemes))
    return itself


def create_openapi_document(operations: Sequence[Operation], security_schemes: Mapping[str, Any]) -> dict[str, Any]:
    """Generate the OpenAPI document of `operations`. `security_schemes`: `BEARER`, or empty if requests need no
    token."""
    types = [
        type_
        for operation in operations
        for type_ in (operation.answer, operation.query, *operation.other_answers.values())
    ]
    schemas, components = msgspec.json.schema_components(
        [*types, answers.ProblemAnswer], ref_template=SCHEMA_PREFIX + "{name}"
    )
    schemas_by_type = dict(
        zip(map(repr, [*types, answers.ProblemAnswer]), map(_with_public_names, schemas), strict=True)
    )
    queries = {operation.query.__name__ for operation in operations}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidemark sidecar",
            "version": version("tidemark-streams"),
            "description": "How far each stream may be read. IDs are signed 64-bit integers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            operation.path: {"get": _describe_operation(operation, schemas_by_type, components, security_schemes)}
            for operation in operations
        },
        "components": {
            "schemas": {
                name.removesuffix(ANSWER_SUFFIX): _with_public_names(schema)
                for name, schema in components.items()
                if name not in queries
            },
            **({"securitySchemes": security_schemes} if security_schemes else {}),
        },
    }


def _with_public_names(schema: Any) -> Any:
    """Copy a schema with the public names of our types, which have no `ANSWER_SUFFIX`."""
    match schema:
        case dict():
            return {
                key: value.removesuffix(ANSWER_SUFFIX)
                if key == "title" and isinstance(value, str)
                else _with_public_names(value)
                for key, value in schema.items()
            }
        case list():
            return [_with_public_names(item) for item in schema]
        case str() if schema.startswith(SCHEMA_PREFIX):
            return schema.removesuffix(ANSWER_SUFFIX)
    return schema


def _describe_operation(
    operation: Operation,
    schemas_by_type: Mapping[str, Any],
    components: Mapping[str, Any],
    security_schemes: Mapping[str, Any],
) -> dict[str, Any]:
    answered = {
        "description": operation.summary,
        "content": {operation.media_type: {"schema": schemas_by_type[repr(operation.answer)]}},
    }
    responses: dict[str, Any] = {"200": answered}
    if operation.has_etag:
        etag = {
            "ETag": {
                "description": "Stays the same while only ages change.",
                "required": True,
                "schema": {"type": "string"},
            }
        }
        answered["headers"] = etag
        responses["304"] = {"description": "Nothing has changed, except ages.", "headers": etag}
    for status, type_ in operation.other_answers.items():
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {JSON_MEDIA_TYPE: {"schema": schemas_by_type[repr(type_)]}},
        }
    for problem in [problem for problem in operation.problems if security_schemes or problem is not Unauthorized]:
        responses[str(int(problem.status))] = _problem_response(problem, schemas_by_type)
    described = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [
            *_path_parameters(operation),
            *_query_parameters(operation, components),
            *_header_parameters(operation),
        ],
        "responses": responses,
    }
    return described | (
        {"security": [{name: []} for name in security_schemes]} if operation.needs_token and security_schemes else {}
    )


def _problem_response(problem: type[Problem], schemas_by_type: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "description": f"{problem.title}: `{urn(problem.type)}`.",
        "content": {PROBLEM_MEDIA_TYPE: {"schema": schemas_by_type[repr(answers.ProblemAnswer)]}},
    }


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    if "{stream}" not in operation.path:
        return []
    schema = {"type": "string", "pattern": NAME_PATTERN}
    description = "The name of the stream."
    return [{"name": "stream", "in": "path", "required": True, "description": description, "schema": schema}]


def _query_parameters(operation: Operation, components: Mapping[str, Any]) -> list[dict[str, Any]]:
    schema = components[operation.query.__name__]
    required = schema.get("required", [])
    return [
        {
            "name": name,
            "in": "query",
            "required": name in required,
            "description": described.get("description", name),
            "schema": {key: value for key, value in described.items() if key != "description"},
        }
        for name, described in schema["properties"].items()
    ]


def _header_parameters(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "description": HEADER_DESCRIPTIONS[name], "schema": {"type": "string"}}
        for name in operation.headers
    ]
