"""The document about the interface, held against a running sidecar with generated requests."""

import re
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.app.sidecar.given import At, SidecarClient, moved, sidecar
from tests.sinks.reader.given import Pipeline
from tidemark.app.read_side import ReadSideConfig
from tidemark.app.sidecar.answers import PROBLEM_MEDIA_TYPE as PROBLEM_TYPE
from tidemark.app.sidecar.app import OPERATIONS, AppConfig
from tidemark.app.sidecar.event_stream import EVENT_STREAM
from tidemark.app.sidecar.openapi import BEARER, OPENAPI_PATH, create_openapi_document
from tidemark.app.sidecar.service import Limits
from tidemark.sinks.reader import Token

if TYPE_CHECKING:
    from schemathesis import APIOperation, Case

GENERATED = sorted([OPENAPI_PATH, *(it.path for it in OPERATIONS)])
BEARER_SENT = {"Authorization": "Bearer sesame"}
STREAMING = [it.path for it in OPERATIONS if it.media_type == EVENT_STREAM]
CASES = [(path, None) for path in GENERATED] + [(path, "s") for path in GENERATED if "{stream}" in path]


@pytest.fixture
def guarded(pipeline: Pipeline, servers: ReadSideConfig, tmp_path: Path) -> Iterator[SidecarClient]:
    """With tokens, short waits, and a stream whose name requests are steered to."""
    pipeline.publish(moved("s", 7, first=At(0, 9, pending=12), second=At(0, 7)))
    (tmp_path / "tokens").write_text("sesame\n")
    with sidecar(servers, AppConfig(tokens_file=tmp_path / "tokens", limits=Limits(wait_seconds=0.05))) as client:
        client.headers["Authorization"] = "Bearer sesame"
        yield client


def test_every_operation_is_described(guarded: SidecarClient) -> None:
    """All paths, each with its problems and whether it needs a token."""
    document = guarded.json("/openapi.json")
    assert sorted(document["paths"]) == sorted([OPENAPI_PATH, *(it.path for it in OPERATIONS)])
    wait = document["paths"]["/v1/streams/{stream}/wait"]["get"]
    assert set(wait["responses"]) == {"200", "400", "401", "404", "409", "412", "429", "503"}
    assert wait["security"]
    assert [it["name"] for it in wait["parameters"] if it["required"]] == ["stream", "token"]
    assert "security" not in document["paths"]["/livez"]["get"]


def test_tokens_are_described_where_they_are_needed() -> None:
    """Where everybody may ask, the document declares no security and no 401; what a token looks like it says always."""
    bare, guarded = (str(create_openapi_document(OPERATIONS, security)) for security in ({}, BEARER))
    assert "401" in guarded
    assert not [word for word in ("401", "security", "bearer") if word in bare]
    wait = create_openapi_document(OPERATIONS, {})["paths"]["/v1/streams/{stream}/wait"]["get"]["parameters"]
    pattern = next(it["schema"]["pattern"] for it in wait if it["name"] == "token")
    for token in ("m7", "m-7~web.-9", str(Token.of(7, {"a.b%~c": 9}))):
        assert re.fullmatch(pattern, token)
    assert not re.fullmatch(pattern, "7~web.9")


@pytest.mark.parametrize("path", STREAMING)
def test_event_streams_take_any_request(guarded: SidecarClient, path: str) -> None:
    """Whatever stream is named, and wherever a client says that it was: an answer, and never a 500."""
    plain = st.one_of(st.binary(), st.recursive(st.integers(-(2**63), 2**63 - 1) | st.text(), nested).map(packed))
    places = plain.map(lambda it: "p" + urlsafe_b64encode(zlib.compress(it)).decode())
    headers = st.one_of(places, st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=200))
    names = st.lists(st.one_of(st.just("s"), st.text(max_size=20)), max_size=3)

    @given(last=headers, streams=names)
    @settings(max_examples=50, suppress_health_check=list(HealthCheck), database=None, deadline=None)
    def ask(last: str, streams: list[str]) -> None:
        with guarded.stream("GET", path, params={"stream": streams}, headers={"Last-Event-ID": last}) as answer:
            assert answer.status_code in {200, 400, 404, 429}
            assert answer.headers["content-type"].partition(";")[0] in {EVENT_STREAM, PROBLEM_TYPE}

    ask()


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def test_running_sidecar_keeps_what_the_document_says(guarded: SidecarClient, subtests: pytest.Subtests) -> None:
    """Generated requests, right and wrong, of event streams too: status, headers, media type and body are as described,
    never a 500."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(guarded.json("/openapi.json"))
    schema.config.update(base_url=str(guarded.base_url))
    for path, stream in CASES:
        with subtests.test(path=path, stream=stream):
            _ask(guarded, schema[path]["GET"], stream)


def _ask(client: SidecarClient, operation: "APIOperation[Any, Any, Any, Any]", stream: str | None) -> None:
    from schemathesis.checks import CHECKS

    # Whether a token is fit for a stream is no matter of its form, so valid requests may be refused as well.
    # The schema of a stream is that of the data of an event, and not of an event.
    names = {"positive_data_acceptance", *(["response_schema_conformance"] if operation.path in STREAMING else [])}
    left_out = [check for check in CHECKS.get_all() if check.__name__ in names]

    @given(case=operation.as_strategy())
    @settings(max_examples=20, suppress_health_check=list(HealthCheck), database=None)
    def ask(case: Any) -> None:
        if stream is not None:
            case.path_parameters = {"stream": stream}
        if operation.path in STREAMING:
            case.validate_response(_begun(client, case), headers=BEARER_SENT, excluded_checks=left_out)
        else:
            case.call_and_validate(headers=BEARER_SENT, excluded_checks=left_out)

    ask()


def _begun(client: SidecarClient, case: "Case[Any]") -> httpx.Response:
    """The answer; of a stream, which does not end, what comes up to its first event."""
    sent = case.as_transport_kwargs(headers=BEARER_SENT)
    request = client.build_request(sent["method"], sent["url"], params=sent["params"], headers=dict(sent["headers"]))
    answer = client.send(request, stream=True)
    try:
        body = b""
        if answer.headers.get("content-type", "").startswith(EVENT_STREAM):
            for piece in answer.iter_bytes():
                body += piece
                if b"data: " in body or b": at\n" in body:
                    break
        else:
            body = answer.read()
    finally:
        answer.close()
    headers = [(name, value) for name, value in answer.headers.multi_items() if name != "content-encoding"]
    found = httpx.Response(answer.status_code, headers=headers, content=body, request=request)
    found.elapsed = answer.elapsed
    return found
