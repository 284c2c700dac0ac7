"""Messages and tools in Ollama's form become canonical ones."""

from typing import Any

import pytest

from deployments.http.parsed_request import ReadingRules
from deployments.requests import Route
from engine.errors import InvalidRequest
from engine.processing.message import image_sources
from tests.deployments.http.ollama.conftest import HI, asked, parsed_chat, parsed_prompt


def call(name: str, arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments or {}}, **more}


def tool(name: str = "find", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **more}}


def test_roles_in_capitals_thoughts_and_unknown_keys():
    messages = [
        {"role": "System", "content": "S"},
        {"role": "USER", "content": "Hi", "id": 7},
        {"role": "assistant", "content": "Hello", "thinking": "A greeting."},
        {"role": "user", "content": None},
    ]
    assert list(asked(messages=messages).messages) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."},
        {"role": "user", "content": ""},
    ]


def test_arguments_of_calls_become_json_text_and_results_find_their_calls():
    messages = [
        HI,
        {"role": "assistant", "content": "", "tool_calls": [call("a", {"x": "é"}), call("b"), call("a", {"x": 2})]},
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of a", "tool_name": "a"},
        {"role": "tool", "content": "of the rest"},
        {"role": "tool", "content": "of none"},
    ]
    _, called, *results = asked(messages=messages).messages
    assert [one["function"] for one in called["tool_calls"]] == [
        {"name": "a", "arguments": '{"x": "é"}'},
        {"name": "b", "arguments": "{}"},
        {"name": "a", "arguments": '{"x": 2}'},
    ]
    ids = [one["id"] for one in called["tool_calls"]]
    assert len(set(ids)) == 3
    assert [one["tool_call_id"] for one in results] == [ids[1], ids[0], ids[2], "call_5"]
    assert results[0]["name"] == "b" and "name" not in results[2]


def test_a_result_with_an_id_belongs_to_its_call():
    calls = [call("a", id="call_x"), call("a", id="call_y")]
    messages = [
        HI,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "call_y"},
        {"role": "tool", "content": "1", "tool_name": "a"},
    ]
    assert [one["tool_call_id"] for one in asked(messages=messages).messages[2:]] == ["call_y", "call_x"]


def test_the_same_history_has_the_same_ids_in_each_turn():
    messages = [HI, {"role": "assistant", "tool_calls": [call("a")]}, {"role": "tool", "content": "1"}]
    first, second = asked(messages=messages), asked(messages=[*messages, HI])
    assert list(second.messages[:3]) == list(first.messages)


def test_images_come_before_the_text_and_go_to_the_media_planner():
    messages = [{"role": "user", "content": "What is it?", "images": ["iVBO", "data:image/png;base64,iVBO"]}]
    parsed = parsed_chat(messages=messages)
    assert parsed.route is Route.MLLM
    found = list(image_sources(parsed.request.messages))
    assert [source.url for source in found] == ["data:image/any;base64,iVBO", "data:image/png;base64,iVBO"]
    assert [source.field for source in found] == ["messages[0].images[0]", "messages[0].images[1]"]
    assert parsed.request.messages[0]["content"][-1] == {"type": "text", "text": "What is it?"}
    prompt = parsed_prompt(prompt="What is it?", images=["iVBO"])
    assert [source.field for source in image_sources(prompt.request.messages)] == ["images[0]"]
    assert (prompt.route, prompt.echo.is_load) == (Route.MLLM, False)


def test_an_image_is_refused_where_the_model_reads_none_and_where_it_is_an_address():
    messages = [{**HI, "images": ["iVBO"]}]
    with pytest.raises(InvalidRequest, match=r"`messages\[0\]\.images\[0\]` is image input"):
        parsed_chat(ReadingRules("org/demo", frozenset()), messages=messages)
    with pytest.raises(InvalidRequest, match="base64"):
        parsed_chat(messages=[{**HI, "images": ["HTTP://example.com/a.png"]}])


def test_tools_keep_their_schemas():
    [found] = asked(tools=[tool(description="Finds.")]).tools
    assert (found.name, found.description, found.parameters) == ("find", "Finds.", {"type": "object"})
    assert asked(tools=[{"function": {"name": "bare"}}]).tools[0].parameters is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "images": "iVBO"}]}, "messages[0].images"),
        ({"messages": [{"role": "user", "content": "x", "images": [""]}]}, "messages[0].images[0]"),
        ({"messages": [{"role": "user", "content": "x", "images": [{"url": "x"}]}]}, "messages[0].images[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [HI] * 4097}, "messages"),
        ({"messages": HI}, "messages"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tools": [{**tool("a"), "type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool(str(i)) for i in range(1025)]}, "tools"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest) as caught:
        parsed_chat(**fields)
    assert caught.value.field == field, caught.value.message
