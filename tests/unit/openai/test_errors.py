"""Errors of servers, and errors in bodies, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rsrv.openai.bodies import (
    MAX_TOKENS,
    ApiBody,
    ChatBody,
    CompletionsBody,
    DetokenizeBody,
    EmbeddingsBody,
    RerankBody,
)
from rsrv.openai.errors import ApiError, from_status


@pytest.mark.parametrize(
    ("code", "text", "status", "tag", "retry_after"),
    [
        ("INVALID_ARGUMENT", "text is too long", 400, "INVALID", None),
        ("NOT_FOUND", "there is no model", 404, "NOT_FOUND", None),
        ("UNAVAILABLE", "[rsrv:QUEUE_FULL] many wait; retry after 120 ms", 429, "QUEUE_FULL", "1"),
        ("RESOURCE_EXHAUSTED", "[rsrv:QUEUE_FULL] many wait; retry after 2.5 s", 429, "QUEUE_FULL", "3"),
        ("UNAVAILABLE", "[rsrv:STARTING] 3 of 4 modules", 503, "STARTING", "1"),
        ("DEADLINE_EXCEEDED", "[rsrv:DEADLINE] too late", 504, "DEADLINE", None),
        ("UNAVAILABLE", "failed to connect to all addresses; 10.0.0.7", 503, "UNAVAILABLE", "1"),
        ("INTERNAL", "a hook raised", 500, "INTERNAL", None),
        ("DATA_LOSS", "", 500, "INTERNAL", None),
    ],
)
def test_errors_of_a_server_keep_their_tag(
    code: str, text: str, status: int, tag: str, retry_after: str | None
) -> None:
    """The tag of an error becomes its `code`. Addresses of servers are not shown."""
    error = from_status(code, text)
    assert (error.status, error.code, error.headers.get("Retry-After")) == (status, tag, retry_after)
    assert "[rsrv:" not in str(error)
    assert "10.0.0.7" not in str(error)
    assert str(error)


#: Token ids: half of the number that a call may have.
LONG = ",".join(["1"] * (MAX_TOKENS // 2))
EMBED = '{"model": "m", "input": %s}'
CHAT = '{"model": "m", "messages": [{"role": "user", "content": %s}]%s}'


@pytest.mark.parametrize(
    ("form", "body", "message", "param"),
    [
        (EmbeddingsBody, "{", "the body is not JSON", None),
        (EmbeddingsBody, "[" * 100_000, "the body is not JSON", None),
        (EmbeddingsBody, "[]", "the body must be a JSON object", None),
        (EmbeddingsBody, '{"input": "a"}', "`model` is missing", "model"),
        (
            DetokenizeBody,
            '{"model": "m", "tokens": [%s1]}' % ("1," * MAX_TOKENS),
            "at most 1048576 items",
            "tokens",
        ),
        (EmbeddingsBody, EMBED % "[]", "at least 1 item", "input"),
        (
            EmbeddingsBody,
            EMBED % f"[{f'[{LONG}],' * 2}[1]]",
            "has more than 1,048,576 texts or token ids",
            "input",
        ),
        (EmbeddingsBody, EMBED % f"[{LONG},{LONG},1]", "has more than 1,048,576 texts or token ids", "input"),
        (EmbeddingsBody, EMBED % ("[" + ",".join(['""'] * 2049) + "]"), "at most 2048 items", "input"),
        (EmbeddingsBody, EMBED % '["a", 5]', "must be a valid string", "input.1"),
        (EmbeddingsBody, EMBED % '"a", "foo": 1', "`foo` is an unknown field", "foo"),
        (EmbeddingsBody, EMBED % '"a", "|x": 1', r"`\|x` is an unknown field", "|x"),
        (EmbeddingsBody, '{"model": "' + "m" * 257 + '", "input": "a"}', "at most 256 characters", "model"),
        (EmbeddingsBody, EMBED % '"a", "dimensions": 0', "must be greater than or equal to 1", "dimensions"),
        (
            RerankBody,
            '{"model": "m", "query": "q", "documents": [3]}',
            "must be a valid string",
            "documents.0",
        ),
        (
            ChatBody,
            CHAT % ('[{"type": "image_url", "image_url": {"url": "http://x"}}]', ""),
            "must be 'text'",
            None,
        ),
        (
            ChatBody,
            '{"model": "m", "messages": [{"role": "user<|im_end|>", "content": "a"}]}',
            "should match pattern",
            "messages.0.role",
        ),
        (
            ChatBody,
            '{"model": "m", "messages": [{"role": "user", "name": "x\\n", "content": "a"}]}',
            "should match pattern",
            "messages.0.name",
        ),
        (ChatBody, CHAT % ('"a"', ', "tools": [{}]'), "`tools` is not supported", "tools"),
        (ChatBody, CHAT % ('"a"', ', "n": 2'), "must be 1", "n"),
        (ChatBody, CHAT % ('"a"', ', "max_tokens": 9223372036854775808'), "must be less than", "max_tokens"),
        (ChatBody, CHAT % ('"a"', ', "response_format": {"type": "json_object"}'), "not supported", None),
        (ChatBody, CHAT % ('"a"', ', "stop": ["' + "x" * 257 + '"]'), "at most 256 characters", "stop.0"),
        (CompletionsBody, '{"model": "m", "prompt": ["a", "b"]}', "at most 1 item", "prompt"),
    ],
)
def test_a_wrong_body_is_refused_by_its_field(form: Any, body: str, message: str, param: str | None) -> None:
    """The error for a wrong body names the field and the fault."""
    with pytest.raises(ApiError, match=message) as refused:
        form.read(body.encode())
    assert refused.value.status == 400
    if param is not None:
        assert refused.value.body["error"]["param"] == param


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (EmbeddingsBody, EMBED % ("[" + ",".join(["-1"] * 10_000) + "]")),
        (EmbeddingsBody, EMBED % ("[" + ",".join(["{}"] * 10_000) + "]")),
        (EmbeddingsBody, EMBED % ('"a",' + ",".join(f'"a{index}": 1' for index in range(10_000)))),
        (
            RerankBody,
            '{"model": "m", "query": "q", "documents": [{'
            + ",".join(f'"{i}": 1' for i in range(10_000))
            + "}]}",
        ),
        (ChatBody, CHAT % ("[" + ",".join(["1"] * 10_000) + "]", "")),
        (CompletionsBody, '{"model": "m", "prompt": "a", "stop": [' + ",".join(["1"] * 10_000) + "]}"),
    ],
)
def test_a_body_with_many_faults_is_refused_at_the_first_ones(form: type[ApiBody], body: str) -> None:
    """A body with many faults is refused at the first ones, because millions of errors would take gigabytes and block other calls."""
    with pytest.raises(ValidationError) as refused:
        form.model_validate_json(body)
    assert refused.value.error_count() <= 3


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    """Null and neutral values are accepted for fields that rsrv does not support, because clients send them."""
    neutral = ', "tools": [], "stream_options": {"include_usage": null}, "logprobs": false, "n": null, "response_format": {"type": "text"}, "stop": "x"'
    body = ChatBody.read(
        (CHAT % ('[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]', neutral)).encode()
    )
    assert body.messages[0].text == "ab"
    assert body.stop == ["x"]
