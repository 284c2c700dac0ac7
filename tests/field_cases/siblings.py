"""Requests of the same classes as cases.jsonl, and what must hold of their answers."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

HELLO = [{"role": "user", "content": "Hello!"}]
PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " /[a-z.]{1,12}/ LF line~1..2   -> add
line: "+" /[a-z ]{0,12}/ LF
%import common.LF
"""
PATCHED = re.compile(
    r"\*\*\* Begin Patch\n(\*\*\* Add File: [a-z.]{1,12}\n(\+[a-z ]{0,12}\n){1,2})+\*\*\* End Patch\n?"
)


@dataclass(frozen=True)
class Sibling:
    """A request and its expected answer."""

    name: str
    path: str
    body: dict[str, Any]
    check: Callable[[httpx.Response], object] = field(default=lambda response: True)
    """Returns whether the answer is right; may raise."""
    status: int = 200


def custom(definition: str | None, syntax: str = "lark", name: str = "write") -> dict[str, Any]:
    """Return a custom tool of the Responses API."""
    form = {} if definition is None else {"format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    return {"type": "custom", "name": name, "description": "Writes.", **form}


def responses(*tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a request for a response whose first tool must be called."""
    choice = {"type": tools[0]["type"], "name": tools[0]["name"]}
    few = {"input": "Go.", "max_output_tokens": 120, "temperature": 0}
    return {**few, "tools": list(tools), "tool_choice": choice, **fields}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def calls(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the calls of a response, streamed or not."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    body = events(response)[-1]["response"] if is_stream else response.json()
    return [item for item in body["output"] if item["type"].endswith("_call")]


def streams_input(response: httpx.Response) -> bool:
    """Tell whether the text of a custom tool's call is streamed as its item has it."""
    [call] = calls(response)
    sent = events(response)
    deltas = [event["delta"] for event in sent if event["type"] == "response.custom_tool_call_input.delta"]
    [done] = [event["input"] for event in sent if event["type"] == "response.custom_tool_call_input.done"]
    return "".join(deltas) == done == call["input"] and len(deltas) > 1 and PATCHED.fullmatch(done) is not None


def ignores(*names: str) -> Callable[[httpx.Response], bool]:
    """Return a check that these names are reported as ignored."""
    return lambda response: set(names) <= set(response.headers.get("x-orchard-ignored", "").split(", "))


CHAT = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
CALL = {"type": "custom_tool_call", "call_id": "call_1", "name": "write", "input": "*** Begin Patch\n"}
OUTPUT = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Done."}
USER = {"role": "user", "content": "Go."}
SUM = 'start: sum\nsum: sum "+" term | term\nterm: /[0-9]/ | "(" sum ")"'


def chat_custom(definition: str | None, syntax: str = "lark", **fields: Any) -> dict[str, Any]:
    """Return a chat completion that must call a custom tool."""
    inner: dict[str, Any] = {"name": "write", "description": "Writes."}
    if definition is not None:
        inner["format"] = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    choice = {"type": "custom", "custom": {"name": "write"}}
    few = {"model": "demo", "messages": [{"role": "user", "content": "Go."}], "max_tokens": 120, "temperature": 0}
    return {**few, "tools": [{"type": "custom", "custom": inner}], "tool_choice": choice, **fields}


def written(response: httpx.Response) -> str:
    """Return the text of the first call of a chat completion, streamed or not."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    sent = [event["choices"][0]["delta"] for event in events(response) if event["choices"]] if is_stream else []
    messages = sent or [response.json()["choices"][0]["message"]]
    first, *more = [call for message in messages for call in message.get("tool_calls") or ()]
    assert first["type"] == "custom" and bool(more) == is_stream
    return "".join(call["custom"]["input"] for call in (first, *more))


SIBLINGS = [
    Sibling(
        "chat-custom-lark", "/v1/chat/completions", chat_custom(PATCH), lambda got: PATCHED.fullmatch(written(got))
    ),
    Sibling(
        "chat-custom-streamed",
        "/v1/chat/completions",
        chat_custom(SUM, stream=True),
        lambda got: re.fullmatch(r"[0-9+()]+", written(got)),
    ),
    Sibling(
        "chat-custom-regex",
        "/v1/chat/completions",
        chat_custom(r"^(May|June) \d{1,2}$", "regex"),
        lambda got: re.fullmatch(r"(May|June) \d{1,2}", written(got)),
    ),
    Sibling(
        "chat-custom-history",
        "/v1/chat/completions",
        chat_custom(
            None,
            tool_choice="auto",
            messages=[
                {"role": "user", "content": "Go."},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "write", "input": "a"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "Done."},
            ],
        ),
    ),
    Sibling(
        "custom-lark",
        "/v1/responses",
        responses(custom(PATCH)),
        lambda response: PATCHED.fullmatch(calls(response)[0]["input"]),
    ),
    Sibling("custom-lark-streamed", "/v1/responses", responses(custom(PATCH), stream=True), streams_input),
    Sibling(
        "custom-regex",
        "/v1/responses",
        responses(custom(r"^(?P<month>May|June) \d{1,2}$", "regex")),
        lambda response: re.fullmatch(r"(May|June) \d{1,2}", calls(response)[0]["input"]),
    ),
    Sibling(
        "custom-recursive",
        "/v1/responses",
        responses(custom(SUM)),
        lambda response: re.fullmatch(r"[0-9+()]+", calls(response)[0]["input"]),
    ),
    Sibling(
        "custom-any-text",
        "/v1/responses",
        responses(custom(None), max_output_tokens=400),
        lambda response: all(isinstance(call["input"], str) for call in calls(response)),
    ),
    Sibling("custom-history", "/v1/responses", responses(custom(None), input=[USER, CALL, OUTPUT], tool_choice="auto")),
    Sibling(
        "additional-tools-namespace",
        "/v1/responses",
        responses(
            {"type": "custom", "name": "exec", "namespace": "functions"},
            tools=[],
            tool_choice={"type": "custom", "name": "exec", "namespace": "functions"},
            input=[
                {
                    "type": "additional_tools",
                    "role": "developer",
                    "tools": [
                        {
                            "type": "namespace",
                            "name": "functions",
                            "description": "",
                            "tools": [custom("start: /x=[0-9]+/", name="exec")],
                        }
                    ],
                },
                USER,
            ],
        ),
        lambda response: [(call["name"], call["namespace"]) for call in calls(response)] == [("exec", "functions")],
    ),
    Sibling(
        "built-in-apply-patch",
        "/v1/responses",
        {"input": "Go.", "max_output_tokens": 20, "tools": [{"type": "apply_patch"}]},
        ignores("tools[0] (apply_patch)"),
    ),
    Sibling(
        "reasoning-of-all-turns",
        "/v1/responses",
        {"input": "Go.", "max_output_tokens": 20, "reasoning": {"context": "all_turns"}},
        ignores("reasoning.context"),
    ),
    Sibling(
        "response-object",
        "/v1/responses",
        {"input": "Go.", "max_output_tokens": 5},
        lambda response: all(
            isinstance(response.json()[name], float)
            for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty")
        ),
    ),
    Sibling(
        "template-kwargs-unknown",
        "/v1/chat/completions",
        {**CHAT, "chat_template_kwargs": {"enable_thinking": False, "xml_tags": ["a"], "date": "2026-01-01"}},
        ignores("chat_template_kwargs.xml_tags", "chat_template_kwargs.date"),
    ),
    Sibling(
        "template-kwargs-known",
        "/v1/chat/completions",
        {**CHAT, "chat_template_kwargs": {"enable_thinking": True}},
        lambda response: "x-orchard-ignored" not in response.headers,
    ),
    Sibling(
        "template-kwargs-of-rendering",
        "/v1/chat/completions",
        {**CHAT, "chat_template_kwargs": {"messages": []}},
        status=400,
    ),
    Sibling("tokenize-special", "/tokenize", {"prompt": "Hello", "add_special_tokens": True}),
    Sibling("tokenize-null", "/tokenize", {"prompt": "Hello", "add_special_tokens": None}),
    Sibling(
        "tokenize-chat-no-special",
        "/tokenize",
        {"messages": HELLO, "add_special_tokens": False},
        lambda response: response.json()["count"] > 1,
    ),
    Sibling(
        "unknown-model",
        "/v1/chat/completions",
        {**CHAT, "model": "gpt-5"},
        lambda response: "http.served_model_names" in response.text,
        404,
    ),
    Sibling(
        "messages-clear-tool-uses",
        "/v1/messages",
        {
            **CHAT,
            "context_management": {
                "edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 30000}}]
            },
        },
        ignores("context_management.edits.0 (clear_tool_uses_20250919)"),
    ),
    Sibling("custom-unknown-rule", "/v1/responses", responses(custom("start: lines")), status=400),
    Sibling("custom-lookahead", "/v1/responses", responses(custom("a(?!b)", "regex")), status=400),
]
