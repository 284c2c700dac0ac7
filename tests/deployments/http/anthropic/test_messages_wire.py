"""Fields of a body: honoured, accepted because they ask for nothing, refused in Anthropic's phrases, or unknown."""

import hashlib
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from deployments.http.anthropic.block_wire import MAX_BLOCKS
from deployments.http.anthropic.messages_wire import (
    MAX_TOOLS,
    MessagesEcho,
    parse_count_tokens,
    parse_messages,
)
from deployments.http.anthropic.phrases import NOT_PERMITTED, ThreadsUnsupported
from deployments.http.errors import ModelNotFound
from deployments.requests import Thinking, Tool, ToolChoice
from engine.errors import InvalidRequest
from engine.protocol import GrammarSpec
from tests.deployments.http.anthropic.conftest import RULES, USER, body, parsed, request_of, tool

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "é"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({}, "max_tokens", 100),
        ({"max_tokens": 64000}, "max_tokens", 64000),
        ({"temperature": 0}, "temperature", 0),
        ({"temperature": 1.5}, "temperature", 1.5),
        ({"top_p": 0.9}, "top_p", 0.9),
        ({"top_p": 0, "temperature": 1}, "top_p", 0),
        ({"top_k": 5}, "top_k", 5),
        ({"top_k": -1}, "top_k", 0),
        ({"stop_sequences": ["END", "\n"]}, "stop", ("END", "\n")),
        ({"metadata": {"user_id": "u1", "more": 1}}, "client", hashlib.sha256(b"u1").hexdigest()),
        ({"metadata": {}}, "client", ""),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "grammar",
            GrammarSpec("json_schema", TEXT, "output_config.format.schema"),
        ),
        (
            {"output_format": {"type": "json_schema", "schema": SCHEMA, "name": "City"}},
            "grammar",
            GrammarSpec("json_schema", TEXT, "output_format.schema"),
        ),
    ],
)
def test_honoured_field_reaches_the_request(fields, name, value):
    assert getattr(request_of(**fields), name) == value


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, Thinking("auto", None, None, "thinking.type")),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
            Thinking("auto", 1024, "low", "thinking.type"),
        ),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            Thinking("auto", None, "high", "thinking.type"),
        ),
        ({"output_config": {"effort": "medium"}}, Thinking("auto", 8192, "medium", "output_config.effort")),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 32000}, "max_tokens": 32000},
            Thinking("on", 32000, None, "thinking.type"),
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 31999}, "output_config": {"effort": "low"}},
            Thinking("on", 31999, "low", "thinking.type"),
        ),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            Thinking("off", field="thinking.type"),
        ),
    ],
)
def test_thinking_config_and_effort_become_the_thinking_of_the_request(fields, thinking):
    assert request_of(**fields).thinking == thinking


@pytest.mark.parametrize(("display", "omits"), [("omitted", True), ("summarized", False), ("updates", False)])
def test_display_of_thinking_decides_whether_its_text_is_omitted(display, omits):
    assert parsed(thinking={"type": "adaptive", "display": display}).echo == MessagesEcho(omits)


@pytest.mark.parametrize(
    ("choice", "means", "is_parallel"),
    [
        (None, ToolChoice("auto"), True),
        ({"type": "auto"}, ToolChoice("auto"), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto"), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "tool", "name": "b", "disable_parallel_tool_use": True}, ToolChoice("required", ("b",)), False),
    ],
)
def test_tool_choice_becomes_canonical_with_its_parallelism(choice, means, is_parallel):
    request = request_of(tools=[tool("a"), tool("b")], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (means, is_parallel)


def test_tools_keep_their_order_and_their_examples():
    examples = [{"q": "x"}]
    request = request_of(
        tools=[
            tool("b", type="custom", cache_control={"type": "ephemeral"}, strict=True, eager_input_streaming=True),
            {"name": "a", "input_schema": {}, "input_examples": examples, "allowed_callers": ["direct"]},
        ]
    )
    assert request.tools == (
        Tool("b", "Finds.", {"type": "object", "properties": {}}, True),
        Tool("a", 'Examples of its input:\n{"q": "x"}', {}),
    )


KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": [KEEP_ALL]}},
        {"context_management": {"edits": []}},
        {"service_tier": "auto"},
        {"service_tier": "standard_only"},
        {"speed": "standard"},
        {"mcp_servers": []},
        {"cache_control": {"type": "ephemeral", "ttl": "5m"}},
        {"tools": [], "tool_choice": {"type": "auto"}},
        dict.fromkeys(
            ("safeguards", "thread", "container", "system", "tools", "thinking", "metadata", "stream", "output_config")
        ),
    ],
)
def test_no_op_field_values_leave_the_request_unchanged(fields):
    found = parsed(**fields)
    assert found == parsed()
    assert found.ignored == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_management", {"edits": [{"type": "summarize"}]}),
        ("context_management", {"edits": [KEEP_ALL], "more": 1}),
        ("safeguards", [{"type": "dangerous_tool_use"}]),
        ("safeguards", []),
        ("service_tier", "priority"),
        ("speed", "fast"),
        ("container", "c1"),
        ("mcp_servers", [{"type": "url"}]),
        ("fallbacks", ["other"]),
        ("compaction", {}),
        ("inference_geo", "us"),
        ("diagnostics", {"cache": True}),
        ("billing_policy", "x"),
        ("user_profile_id", "u"),
        ("workspace_id", "w"),
    ],
)
def test_unsupported_field_is_refused_with_the_phrase_of_the_anthropic_api(name, value):
    with pytest.raises(InvalidRequest) as refused:
        parsed(**{name: value})
    assert refused.value.field == name
    assert refused.value.message.startswith(f"{name}: {NOT_PERMITTED}. `{name}` is ")


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_thread_is_refused_with_the_error_code_of_the_anthropic_api(thread):
    with pytest.raises(ThreadsUnsupported) as refused:
        parsed(thread=thread)
    assert refused.value.details == {"error_code": "thread_unsupported_request", "unsupported": ["threads"]}
    copy = pickle.loads(pickle.dumps(refused.value))  # noqa: S301
    assert (copy.message, copy.field, copy.details) == (
        refused.value.message,
        "thread",
        refused.value.details,
    )


def message(**fields):
    return {"messages": [USER, fields]}


def block(role="user", **fields):
    return message(role=role, content=[{"type": "text", "text": "a"}, fields])


IN_RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "audio"}]}
BASH = {"type": "bash_20250124", "name": "bash"}

WRONG = [
    # (fields, path, what the message says)
    ({"max_tokens": None}, "max_tokens", "Field required"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1 (received 0)"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "Hi"}, "messages", "valid list"),
    ({"messages": [5]}, "messages.0", "valid dictionary"),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2 (received 2.5)"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"stream": 1}, "stream", "valid boolean"),
    ({"stop_sequences": "END"}, "stop_sequences", "valid list"),
    ({"stop_sequences": [""]}, "stop_sequences.0", "at least 1 character"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences", "at most 16"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id", "valid string"),
    ({"cache_control": 5}, "cache_control", "valid dictionary"),
    ({"system": 5}, "system", "a string or a list of blocks (received 5)"),
    ({"system": [{"type": "image"}]}, "system.0.type", "'text'"),
    (message(content="Hi"), "messages.1.role", "Field required"),
    (message(role="developer", content="Hi"), "messages.1.role", "'user', 'assistant' or 'system'"),
    (message(role="tool", content="Hi"), "messages.1.role", '(received "tool")'),
    (message(role="user"), "messages.1.content", "Field required"),
    (message(role="user", content=None), "messages.1.content", "a string or a list of blocks"),
    (message(role="user", content=[{"type": "text", "text": "a"}] * (MAX_BLOCKS + 1)), "messages.1.content", "2048"),
    (block(type="audio"), "messages.1.content.1.type", "'text', 'image', 'document' or 'tool_result'"),
    (block(type="document"), "messages.1.content.1.source", "Field required"),
    (block(type="document", source={"type": "base64", "data": "AA=="}), "messages.1.content.1.source.type", "'text'"),
    (block(text="a"), "messages.1.content.1.type", "Field required"),
    (block(type="text"), "messages.1.content.1.text", "Field required"),
    (block(type="image"), "messages.1.content.1.source", "Field required"),
    (block(type="image", source={"type": "file"}), "messages.1.content.1.source.type", "'base64' or 'url'"),
    (
        block(type="image", source={"type": "base64", "media_type": "a;b", "data": "AA=="}),
        "messages.1.content.1.source.media_type",
        "match pattern",
    ),
    (block(type="tool_use", id="t", name="f", input={}), "messages.1.content.1.type", '(received "tool_use")'),
    (block(**IN_RESULT), "messages.1.content.1.content.0.type", "'tool_reference'"),
    (block("assistant", type="image"), "messages.1.content.1.type", "'redacted_thinking' or 'tool_use'"),
    (block("assistant", type="tool_use", id="t", name="f"), "messages.1.content.1.input", "Field required"),
    (block("assistant", type="tool_use", id="t", name="f", input="{}"), "messages.1.content.1.input", "dictionary"),
    (block("system", type="image"), "messages.1.content.1.type", "'text'"),
    ({"tools": [tool(), BASH]}, "tools.1.type", "'custom' (received \"bash_20250124\")"),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema", "Field required"),
    ({"tools": [tool("a b")]}, "tools.0.name", "match pattern"),
    ({"tools": [tool("a"), tool("b"), tool("a")]}, "tools.2.name", "unique"),
    ({"tools": [tool(input_schema={"type": "array"})]}, "tools.0.input_schema.type", "'object'"),
    ({"tools": [tool(allowed_callers=["code_execution_20260120"])]}, "tools.0.allowed_callers.0", "'direct'"),
    ({"tools": [tool(str(i)) for i in range(MAX_TOOLS + 1)]}, "tools", "1024"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type", "requires at least one callable tool"),
    ({"tools": [tool()], "tool_choice": {"type": "tool"}}, "tool_choice.name", "Field required"),
    ({"tools": [tool()], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", '"g" not found'),
    (
        {"tools": [tool(), tool("g", defer_loading=True)], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice.name",
        "deferred",
    ),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type", "'auto', 'any', 'none' or 'tool'"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", "'adaptive', 'enabled' or 'disabled'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "greater than or equal to 1"),
    ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display", "'omitted'"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort", "'max'"),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget", NOT_PERMITTED),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type", "'json_schema'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "Field required"),
]


@pytest.mark.parametrize(("fields", "path", "said"), WRONG)
def test_a_wrong_value_is_named_by_its_path_with_dots(fields, path, said):
    with pytest.raises(InvalidRequest) as refused:
        parsed(**fields)
    assert refused.value.field == path
    assert refused.value.message.startswith(f"{path}: ")
    assert said in refused.value.message


def test_output_format_given_twice_is_refused():
    form = {"type": "json_schema", "schema": SCHEMA}
    with pytest.raises(InvalidRequest, match=r"^output_format: "):
        parsed(output_format=form, output_config={"format": form})


def test_error_about_too_many_wrong_fields_names_no_field():
    with pytest.raises(InvalidRequest, match="too many to name one"):
        parsed(output_config={f"f{i}": 1 for i in range(2000)})


def test_an_unknown_field_is_ignored_and_reported_or_refused():
    assert parsed(foo=1, betas=[]).ignored == ("foo", "betas")
    with pytest.raises(InvalidRequest, match="100 unknown fields"):
        parsed(RULES, **{f"f{i}": 1 for i in range(100)})
    with pytest.raises(InvalidRequest, match=f"^foo: {NOT_PERMITTED}"):
        parsed(replace(RULES, unknown_fields="refuse"), foo=1)


def test_unknown_model_is_not_found_and_an_alias_is_accepted():
    with pytest.raises(ModelNotFound):
        parsed(model="claude-opus")
    assert parsed(replace(RULES, aliases=frozenset({"claude-opus"})), model="claude-opus").request.max_tokens == 100


def test_a_count_needs_no_max_tokens_and_reads_the_same_prompt():
    fields = {"tools": [tool()], "system": "S", "thinking": {"type": "adaptive"}, "tool_choice": {"type": "auto"}}
    whole = body(**fields)
    without = {name: value for name, value in whole.items() if name != "max_tokens"}
    counted = parse_count_tokens(without, RULES).request
    assert counted == replace(parse_messages(whole, RULES).request, max_tokens=None)


def test_parsed_request_survives_pickling():
    found = parsed(tools=[tool()], thinking={"type": "adaptive", "display": "omitted"}, foo=1)
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}, {**KEEP_ALL, "keep": 1}]}},
            (
                "context_management.edits.0 (clear_tool_uses_20250919)",
                "context_management.edits.1 (clear_thinking_20251015)",
            ),
        ),
        (
            {"tools": [{"type": "web_search_20260209", "name": "web_search"}, tool("f")]},
            ("tools.0 (web_search_20260209)",),
        ),
        (
            block("assistant", type="server_tool_use", id="s", name="web_search", input={}),
            ("messages.1.content.1 (server_tool_use)",),
        ),
    ],
)
def test_what_anthropics_servers_would_do_is_left_out_and_named(fields: dict[str, Any], ignored: tuple[str, ...]):
    left = parsed(**fields)
    assert left.ignored == ignored
    assert [tool.name for tool in left.request.tools] == ["f"] * ("tools" in fields)


def test_a_tool_is_usable_from_its_addition_to_its_removal():
    def change(kind: str) -> dict[str, Any]:
        block = {"type": f"tool_{kind}", "tool": {"type": "tool_reference", "name": "later"}}
        return {"role": "system", "content": [{"type": "text", "text": "News."}, block]}

    tools = [tool("now"), tool("later", defer_loading=True)]
    for changes, usable in (((), 1), (("addition",), 2), (("addition", "removal"), 1), (("removal", "addition"), 2)):
        request = request_of(USER, *map(change, changes), tools=tools)
        assert len(request.tools) == usable
        assert ("later" in str(request.messages)) == bool(changes)
