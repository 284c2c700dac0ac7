"""Siblings of the requests in cases.jsonl: other inputs of the same classes, through the whole graph in one process.

Schemas and tools are sent as chat completions, and values that spell markup in each dialect, streamed and whole.
"""

import asyncio
import json
from functools import cache
from typing import Any

import httpx
import pytest

from engine.processing.grammar import MAX_PENDING
from tests.deployments.faulty_graph import Graph
from tests.golden.one_process import BASE_URL, args

ASK = [{"role": "user", "content": "Make one."}]
SHORT = {"max_tokens": 120, "temperature": 0}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def tagged(kind: str, **more: Any) -> dict[str, Any]:
    return closed(kind={"const": kind}, **more)


SCHEMAS: dict[str, tuple[Any, Any]] = {
    # control characters
    "escape": (closed(v={"const": "\x1b[0m"}), {"v": "\x1b[0m"}),
    "vertical tab in a list": (closed(v={"enum": [["a\x0bb"]]}), {"v": ["a\x0bb"]}),
    "several": (closed(v={"const": {"k": "\x00\x01\x7f"}}), {"v": {"k": "\x00\x01\x7f"}}),
    # bounds and numbers that only one value satisfies
    "between integers": (closed(v={"type": "integer", "exclusiveMinimum": 6, "exclusiveMaximum": 8}), {"v": 7}),
    "half": (closed(v={"type": "number", "minimum": 0.5, "maximum": 0.5}), {"v": 0.5}),
    "multiple": (closed(v={"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 20}), {"v": 14}),
    # patternProperties and other objects that end
    "patterns": (
        {
            "type": "object",
            "patternProperties": {"^k": {"const": 1}},
            "additionalProperties": False,
            "maxProperties": 0,
        },
        {},
    ),
    "pattern beside properties": (
        {**closed(v={"const": 1}), "patternProperties": {"^x": {"const": 2}}, "maxProperties": 1},
        None,
    ),
    "map of nothing": (closed(v={"type": "object", "additionalProperties": False}), {"v": {}}),
    # oneOf and unions
    "union": (closed(v={"oneOf": [tagged("a", n={"const": 1}), tagged("a", n={"const": 2})]}), None),
    "tagged by number": (closed(v={"oneOf": [closed(k={"const": 1}), closed(k={"const": 1.5})]}), None),
    "ranges": (closed(v={"oneOf": [{"type": "integer", "minimum": 9, "maximum": 9}, {"type": "null"}]}), None),
    # formats and names
    "unknown format": (closed(v={"type": "string", "format": "money", "enum": ["1 EUR"]}), {"v": "1 EUR"}),
    "name with spaces": (closed(**{"Account Number": {"const": 5}}), {"Account Number": 5}),
    "name with quotes": (closed(**{'a "b" \\ é 😀': {"const": 5}}), {'a "b" \\ é 😀': 5}),
    "empty name": (closed(**{"": {"const": 5}}), {"": 5}),
    "sizes with decimals": (
        closed(v={"type": "array", "items": {"const": 1}, "minItems": 2.0, "maxItems": 2.0}),
        {"v": [1, 1]},
    ),
    "draft 4": (closed(v={"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 2}), {"v": 2}),
}
"""A schema, and the only value that it has; None: the parsed answer is only valid."""

REFUSED: dict[str, tuple[Any, str]] = {
    "branches that overlap": (closed(v={"oneOf": [{"type": "number"}, {"const": 1}]}), "`oneOf` at $.properties.v"),
    "nested": (closed(v={"type": "array", "items": {"oneOf": [{}, True]}}), "`oneOf` at $.properties.v.items"),
    "in $defs": (
        {**closed(v={"$ref": "#/$defs/a"}), "$defs": {"a": {"oneOf": [{"minimum": 1}, {"maximum": 0}]}}},
        "`oneOf` at $.$defs.a",
    ),
    "patterns that overlap": (
        closed(v={"type": "object", "patternProperties": {"a+": {}, "aa+": {"type": "null"}}}),
        "`patternProperties` at $.properties.v",
    ),
    "no value": (closed(v={"type": "string", "minLength": 3, "maxLength": 2}), "at $.properties.v"),
}

TOOLS: dict[str, tuple[Any, str | None]] = {
    "reference": ({"$ref": "#/$defs/a", "$defs": {"a": closed(c={"enum": ["x"]})}}, None),
    "null keywords": ({**closed(c={"enum": ["x"], "pattern": None}), "$defs": None}, None),
    "spaces": (closed(**{"c d": {"enum": ["x"]}}), None),
    "lookbehind": (closed(c={"type": "array", "maxItems": 0, "items": {"pattern": "(?<!a)b"}}), "c.items.pattern"),
    "contradiction": (closed(c={"type": "integer", "minimum": 2, "maximum": 1, "enum": [7]}), "$.properties.c"),
    "not": (closed(c={"enum": [1], "not": {"const": 1}}), "$.properties.c.not"),
}
"""Parameters, and a part of what X-Orchard-Ignored says; None: nothing."""

VALUES = ("</tool_call>", "<think>", "<|im_end|>", "</parameter>", "[/TOOL_CALLS]", "a</think>b<tool_call>")


def chat(**body: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "demo", "messages": ASK, **SHORT, **body}


def formatted(schema: Any) -> tuple[str, dict[str, Any]]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def with_tool(parameters: Any, strict: bool = False) -> tuple[str, dict[str, Any]]:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    return chat(tools=[{"type": "function", "function": function}], tool_choice="required")


def called(dialect: str, value: str, stream: bool) -> tuple[str, dict[str, Any]]:
    """A request whose answer is a call with this value, in a dialect."""
    schema = closed(c={"enum": [value]}, o=closed(k={"const": value}))
    if dialect == "chat":
        path, body = with_tool(schema)
        return path, {**body, "stream": stream}
    if dialect == "messages":
        tools = [{"name": "f", "input_schema": schema}]
        more = {"messages": ASK, "tools": tools, "tool_choice": {"type": "any"}, **SHORT}
        return "/v1/messages", {"model": "demo", **more, "stream": stream}
    tools = [{"type": "function", "name": "f", "parameters": schema, "strict": False}]
    more = {"input": "Make one.", "tools": tools, "tool_choice": "required", "max_output_tokens": 120}
    return "/v1/responses", {"model": "demo", **more, "temperature": 0, "stream": stream}


CALLED = [
    (dialect, value, (i + k) % 2)
    for i, dialect in enumerate(("chat", "messages", "responses"))
    for k, value in enumerate(VALUES)
]
"""Each value whole in one dialect and streamed in another."""
CHOSEN = [(value, k % 2) for k, value in enumerate(VALUES)]
REQUESTS: dict[Any, tuple[str, dict[str, Any]]] = {
    **{("schema", name): formatted(schema) for name, (schema, _) in SCHEMAS.items()},
    **{("refused", name): formatted(schema) for name, (schema, _) in REFUSED.items()},
    **{("tool", name): with_tool(parameters) for name, (parameters, _) in TOOLS.items()},
    **{("strict", name): with_tool(parameters, True) for name, (parameters, ignored) in TOOLS.items() if ignored},
    **{("called", *case): called(case[0], case[1], bool(case[2])) for case in CALLED},
    **{("choice", *case): chat(guided_choice=[case[0]], stream=bool(case[1])) for case in CHOSEN},
}


@cache
def answers() -> dict[Any, httpx.Response]:
    """Send all requests to one graph, a few at a time."""

    async def go() -> dict[Any, httpx.Response]:
        with pytest.MonkeyPatch.context() as patch:
            graph = Graph(args(), patch)
            await graph.start()
            free = asyncio.Semaphore(MAX_PENDING // 2)  # more may be refused while they are compiled
            try:
                async with httpx.AsyncClient(
                    transport=httpx.ASGITransport(graph.app), base_url=BASE_URL, timeout=120
                ) as client:

                    async def send(path: str, body: dict[str, Any]) -> httpx.Response:
                        async with free:
                            return await client.post(path, json=body)

                    found = await asyncio.gather(*(send(*request) for request in REQUESTS.values()))
                    return dict(zip(REQUESTS, found, strict=True))
            finally:
                await graph.close()

    return asyncio.run(go())


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def content(response: httpx.Response) -> str:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()["choices"][0]["message"]["content"]
    return "".join(choice["delta"].get("content") or "" for event in events(response) for choice in event["choices"])


def arguments(dialect: str, response: httpx.Response, stream: bool) -> Any:
    if dialect == "chat":
        if not stream:
            return json.loads(response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
        deltas = [choice["delta"] for event in events(response) for choice in event["choices"]]
        return json.loads("".join(c["function"]["arguments"] for d in deltas for c in d.get("tool_calls") or ()))
    if dialect == "messages":
        if not stream:
            return next(block["input"] for block in response.json()["content"] if block["type"] == "tool_use")
        return json.loads("".join(event.get("delta", {}).get("partial_json", "") for event in events(response)))
    if not stream:
        return json.loads(next(one["arguments"] for one in response.json()["output"] if one["type"] == "function_call"))
    [done] = [event for event in events(response) if event["type"] == "response.function_call_arguments.done"]
    return json.loads(done["arguments"])


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_gives_the_value_that_it_has(name: str) -> None:
    response, (_, value) = answers()["schema", name], SCHEMAS[name][:2]

    assert response.status_code == 200, response.text
    parsed = json.loads(content(response))
    assert parsed == value if value is not None else isinstance(parsed, dict)


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_by_name_and_place(name: str) -> None:
    response = answers()["refused", name]

    assert response.status_code == 400 and REFUSED[name][1] in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("name", TOOLS)
def test_an_unusual_tool_is_called_and_what_it_leaves_open_is_named(name: str) -> None:
    response, ignored = answers()["tool", name], TOOLS[name][1]

    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert (
        (ignored in response.headers["x-orchard-ignored"]) if ignored else "x-orchard-ignored" not in response.headers
    )


@pytest.mark.parametrize("name", [name for name, (_, ignored) in TOOLS.items() if ignored])
def test_an_unusual_tool_is_refused_by_name_with_strict(name: str) -> None:
    response = answers()["strict", name]

    assert response.status_code == 400 and "$.properties.c" in response.json()["error"]["message"], response.text


@pytest.mark.parametrize(("dialect", "value", "stream"), CALLED)
def test_a_forced_argument_that_spells_markup_arrives_intact(dialect: str, value: str, stream: int) -> None:
    response = answers()["called", dialect, value, stream]

    assert response.status_code == 200 and '"error": {' not in response.text, response.text
    assert arguments(dialect, response, bool(stream)) == {"c": value, "o": {"k": value}}


@pytest.mark.parametrize(("value", "stream"), CHOSEN)
def test_a_choice_that_spells_markup_arrives_intact(value: str, stream: int) -> None:
    assert content(answers()["choice", value, stream]) == value
