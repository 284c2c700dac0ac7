"""Rows: the routes beside chat completions, with bodies that are no JSON and fields that are wrong."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.e2e.hostile.rows import (
    DROP,
    MALFORMED,
    Answer,
    Http,
    Raw,
    Refused,
    RefusedByAnthropic,
    Row,
    Status,
)

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
HELLO = {"role": "user", "content": "Hello!"}
JSON = {"Content-Type": "application/json"}
MANY = 10**9


@dataclass(frozen=True)
class Face:
    """A route with a body that is right."""

    path: str
    body: dict[str, Any]

    @property
    def is_anthropic(self) -> bool:
        return self.path.startswith("/v1/messages")

    def post(self, content: bytes | Callable[[], bytes], content_type: str = "application/json") -> Http:
        return Http("POST", self.path, content, {"Content-Type": content_type})

    def encode(self, **fields: Any) -> bytes:
        body = {**self.body, **fields}
        return json.dumps({name: value for name, value in body.items() if value is not DROP}).encode()

    def refused(self, field: str | None, *says: str, status: int = 400) -> Answer:
        """field: its path, None where the body as a whole is refused, '' for any."""
        if not self.is_anthropic:
            return Refused((status,), field, "", says)
        kind = {404: "not_found_error", 413: "request_too_large"}.get(status, "invalid_request_error")
        return RefusedByAnthropic(status, kind, (*filter(None, [field]), *says))


MESSAGES = Face("/v1/messages", {"model": "demo", "max_tokens": 4, "messages": [HELLO]})
COUNT_TOKENS = Face("/v1/messages/count_tokens", {"model": "demo", "messages": [HELLO]})
RESPONSES = Face("/v1/responses", {"model": "demo", "input": "Hello!", "max_output_tokens": 4, "store": False})
COMPLETIONS = Face("/v1/completions", {"model": "demo", "prompt": "Hello!", "max_tokens": 4})
EMBEDDINGS = Face("/v1/embeddings", {"model": "demo", "input": "Hello!"})
TOKENIZE = Face("/tokenize", {"model": "demo", "prompt": "Hello!"})
DETOKENIZE = Face("/detokenize", {"model": "demo", "tokens": [72]})
FACES = (MESSAGES, COUNT_TOKENS, RESPONSES, COMPLETIONS, EMBEDDINGS, TOKENIZE, DETOKENIZE)


def _malformed(face: Face) -> tuple[Row, ...]:
    """Rows that no route may accept, whatever its fields are."""
    body = face.encode()
    broken: dict[str, tuple[bytes | Callable[[], bytes], Answer]] = {
        "nothing": (b"", face.refused(None, "not valid JSON")),
        "half an object": (body[:-5], face.refused(None, "not valid JSON")),
        "a second object": (body + body, face.refused(None, "not valid JSON")),
        "a byte that begins no character": (body.replace(b"demo", b"de\xffmo"), face.refused(None, "UTF-8")),
        "half a surrogate pair": (body.replace(b"demo", rb"\ud800"), face.refused("", "surrogate")),
        "null": (b"null", face.refused(None, "JSON object")),
        "an array": (b"[" + body + b"]", face.refused(None, "JSON object")),
        "NaN": (body[:-1] + b', "seed": NaN}', face.refused(None, "NaN")),
        "a number of 5000 digits": (body[:-1] + b', "seed": ' + b"9" * 5000 + b"}", face.refused(None, "4300")),
        "100 000 open brackets": (b"[" * 100_000, face.refused(None, "64")),
        "500 001 values": (lambda: b'{"x": [' + b"0," * 500_001 + b"0]}", face.refused(None, "500000")),
    }
    too_large = 32 * 2**20 + 1
    length = b"Content-Length: %d" % len(body)
    return (
        *(Row(f"{face.path}: {name}", face.post(sent), "JSON", answer) for name, (sent, answer) in broken.items()),
        Row(f"{face.path}: a byte more than the limit", face.post(lambda: body + b" " * (too_large - len(body))),
            "http.max_body_bytes", face.refused(None, str(too_large), status=413), cost="large"),
        Row(f"{face.path}: a form", face.post(b"a=b", "application/x-www-form-urlencoded"), "application/json",
            Status((415,))),
        Row(f"{face.path}: PUT", Http("PUT", face.path, body, JSON), "routes", Status((404, 405))),
        Row(f"{face.path}: two lengths", Raw(_raw(face, body, length, b"Content-Length: 5")), "one length", MALFORMED),
        Row(f"{face.path}: a negative length", Raw(_raw(face, body, b"Content-Length: -1")), "Content-Length",
            MALFORMED),
        Row(f"{face.path}: a model of another name", face.post(face.encode(model="other")), "served_model_name",
            face.refused("" if face.is_anthropic else "model", "other", status=404)),
    )  # fmt: skip


def _raw(face: Face, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST " + face.path.encode() + b" HTTP/1.1", b"Host: {host}", b"Content-Type: application/json"]
    return b"\r\n".join([*lines, b"Connection: close", *headers]) + b"\r\n\r\n" + body


Case = tuple[dict[str, Any], str] | tuple[dict[str, Any], str, str]
"""Fields, the path that the error names, and what else its message says."""


def _fields(face: Face, *cases: Case) -> tuple[Row, ...]:
    return tuple(
        Row(f"{face.path}: {_named(fields)}", face.post(face.encode(**fields)), "fields", face.refused(path, *says))
        for fields, path, *says in cases
    )


def _named(fields: dict[str, Any]) -> str:
    text = ", ".join(f"{name} {value!r}" if value is not DROP else f"no {name}" for name, value in fields.items())
    return text if len(text) <= 90 else f"{text[:60]}... ({len(text)} characters)"


def _user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def _image(**source: Any) -> dict[str, Any]:
    return _user({"type": "image", "source": source})


MESSAGES_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"max_tokens": DROP}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"messages": DROP}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello!"}, "messages"),
    ({"messages": [None]}, "messages.0"),
    ({"messages": [{"role": "root", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (_user({"type": "smell"}), "messages.0.content.0"),
    (_user({"type": "text", "text": 5}), "messages.0.content.0.text"),
    (_user({"type": "tool_result", "content": "x"}), "messages.0.content.0.tool_use_id"),
    (_image(type="file", file_id="../x"), "messages.0.content.0.source"),
    (_image(type="base64", media_type="image/png", data="?"), "messages.0.content.0"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"stop_sequences": "END"}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 100}, "stop_sequences"),
    ({"temperature": 5}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -7}, "top_k"),
    ({"stream": "yes"}, "stream"),
    ({"thinking": {"type": "sometimes"}}, "thinking"),
    ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
    ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools.0.name"),
    ({"tools": [{"name": "a"}]}, "tools.0"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
    ({"tool_choice": {"type": "tool", "name": "absent"}}, "tool_choice"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"safeguards": [{"type": "dangerous_tool_use"}]}, "safeguards: Extra inputs are not permitted"),
    ({"container": "c"}, "container: Extra inputs are not permitted"),
)

COUNT_TOKENS_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"system": {"text": "x"}}, "system"),
    ({"tools": "all"}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"thinking": True}, "thinking"),
)


def _input(*items: Any) -> dict[str, Any]:
    return {"input": list(items)}


RESPONSES_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"input": 5}, "input"),
    (_input(None), "input[0]"),
    (_input({"type": "smell"}), "input[0].type"),
    (_input({"role": "root", "content": "x"}), "input[0].role"),
    (_input({"role": "user", "content": [{"type": "input_smell"}]}), "input[0].content[0].type"),
    (_input({"role": "user", "content": [{"type": "input_file", "file_id": "../x"}]}), "input[0].content[0].type"),
    (_input({"type": "function_call_output", "output": "x"}), "input[0].call_id"),
    (_input({"type": "function_call", "call_id": "a", "arguments": "{}"}), "input[0].name"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "10"}, "max_output_tokens"),
    ({"temperature": 5}, "temperature"),
    ({"top_p": "0.5"}, "top_p"),
    ({"stream": "yes"}, "stream"),
    ({"store": "yes"}, "store"),
    ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "absent"}}, "tool_choice"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"metadata": {"a": 5}}, "metadata.a"),
)

COMPLETIONS_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"prompt": DROP}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [{}]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [4096]}, "", "4096"),
    ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
    ({"prompt": ["a"] * 3000}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 5}, "best_of"),
    ({"echo": "yes"}, "echo"),
    ({"logprobs": 50}, "logprobs"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"temperature": 5}, "temperature"),
    ({"stop": 5}, "stop"),
    ({"stream": 1}, "stream"),
)

EMBEDDINGS_CASES: tuple[Case, ...] = (
    ({"model": DROP}, "model"),
    ({"input": DROP}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": {"text": "x"}}, "input"),
    ({"input": ["a", 5]}, "input[1]"),
    ({"input": [-1]}, "input[0]"),
    ({"input": [4096]}, "", "4096"),
    ({"input": ["a"] * 2049}, "input", "2048"),
    ({"input": "4 2 1 7 9 " * 7000}, "input", "32768"),
    ({"encoding_format": "hex"}, "encoding_format"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": MANY}, "dimensions"),
    ({"user": 5}, "user"),
)

TOKENIZE_CASES: tuple[Case, ...] = (
    ({"prompt": DROP}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"messages": [HELLO]}, "prompt"),
    ({"prompt": DROP, "messages": []}, "messages"),
    ({"prompt": DROP, "messages": [5]}, "messages[0]"),
    ({"prompt": DROP, "messages": [HELLO], "tools": "all"}, "tools"),
    ({"return_token_strs": "yes"}, "return_token_strs"),
    ({"add_special_tokens": "no"}, "add_special_tokens"),
)

DETOKENIZE_CASES: tuple[Case, ...] = (
    ({"tokens": DROP}, "tokens"),
    ({"tokens": "1"}, "tokens"),
    ({"tokens": ["a"]}, "tokens[0]"),
    ({"tokens": [-1]}, "tokens[0]"),
    ({"tokens": [4096]}, "tokens", "4096"),
    ({"tokens": [2**40]}, "tokens[0]"),
)

UNKNOWN_IDS = (
    Row("/v1/responses: an unknown response goes on",
        RESPONSES.post(RESPONSES.encode(previous_response_id="resp_" + "x" * 500)), "the store of responses",
        Refused((404,), "previous_response_id")),
    *(Row(f"{method} of {name}", Http(method, path), "the store of responses", Status((404, 405)))
      for method, path, name in (
          ("GET", "/v1/responses/resp_none", "an unknown response"),
          ("DELETE", "/v1/responses/resp_none", "an unknown response"),
          ("POST", "/v1/responses/resp_none/cancel", "an unknown response's cancel"),
          ("GET", "/v1/responses/..%2f..%2fetc%2fpasswd", "a response outside"),
          ("GET", "/v1/responses/" + "x" * 10_000, "a response with an id of 10 kB"),
          ("POST", "/v1/messages/msg_none/cancel", "an unknown message's cancel"),
      )),
)  # fmt: skip

ROWS = (
    *(row for face in FACES for row in _malformed(face)),
    *_fields(MESSAGES, *MESSAGES_CASES),
    *_fields(COUNT_TOKENS, *COUNT_TOKENS_CASES),
    *_fields(RESPONSES, *RESPONSES_CASES),
    *_fields(COMPLETIONS, *COMPLETIONS_CASES),
    *_fields(EMBEDDINGS, *EMBEDDINGS_CASES),
    *_fields(TOKENIZE, *TOKENIZE_CASES),
    *_fields(DETOKENIZE, *DETOKENIZE_CASES),
    *UNKNOWN_IDS,
)
