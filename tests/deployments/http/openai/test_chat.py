"""POST /v1/chat/completions: honoured, neutral and refused fields, and the shape of its answers."""

import json
from typing import Any

import pytest

from deployments.http.generation import TextDelta, ToolCall
from deployments.requests import Route, Thinking, Tool, ToolChoice
from engine.errors import EngineFailed
from engine.protocol import GrammarSpec
from tests.deployments.http.conftest import assert_refused, parts_of

USER = {"role": "user", "content": "Hi"}
IMAGE_URL = "data:image/png;base64,AA=="
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 4,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 0, "drafted_tokens": 0, "accepted_draft_tokens": 0},
}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "F", "parameters": SCHEMA}}
CHOICE = '%llguidance {}\nstart: "a" | "b\\""\n'
OBJECT_FIELD = "structured_outputs.json_object"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def part(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


def message(**fields):
    return {"messages": [USER, fields]}


BAD_FIELDS = [
    # sampling: (fields, param, what the message names)
    ({"temperature": 2.5}, "temperature", ["2.5", "2"]),
    ({"temperature": -0.1}, "temperature", ["-0.1", "0"]),
    ({"temperature": "1"}, "temperature", ['"1"', "a number"]),
    ({"temperature": True}, "temperature", ["true", "a number"]),
    ({"temperature": 10**400}, "temperature", ["a number"]),
    ({"top_p": 1.01}, "top_p", ["1.01", "1"]),
    ({"top_k": -2}, "top_k", ["-2", "-1"]),
    ({"top_k": 1.5}, "top_k", ["1.5", "an integer"]),
    ({"top_k": 2**31}, "top_k", ["2147483648", "2147483647"]),
    ({"min_p": -0.5}, "min_p", ["-0.5", "0"]),
    ({"min_p": 1.5}, "min_p", ["1.5", "1"]),
    ({"seed": 2**63}, "seed", [str(2**63), str(2**63 - 1)]),
    ({"seed": -(2**63) - 1}, "seed", [str(-(2**63))]),
    ({"seed": 1.0}, "seed", ["1.0", "an integer"]),
    ({"max_tokens": 0}, "max_tokens", ["0", "1"]),
    ({"max_tokens": True}, "max_tokens", ["true", "an integer"]),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ["1"]),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", ["5", "6"]),
    ({"stop": 5}, "stop", ["5", "a string or an array"]),
    ({"stop": ["a", ""]}, "stop[1]", ["1 character"]),
    ({"stop": ["a", 5]}, "stop[1]", ["5", "a string"]),
    ({"stop": ["a"] * 17}, "stop", ["16", "17"]),
    ({"stop": "a" * 257}, "stop", ["256"]),
    ({"stream": 1}, "stream", ["1", "true or false"]),
    ({"stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
    ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", ["not supported"]),
    ({"stream": True, "stream_options": []}, "stream_options", ["an object"]),
    ({"user": 5}, "user", ["5", "a string"]),
    ({"user": "a" * 1025}, "user", ["1024"]),
    ({"cache_salt": 5}, "cache_salt", ["5", "a string"]),
    ({"cache_salt": ""}, "cache_salt", ["1 character"]),
    ({"cache_salt": "x" * 129}, "cache_salt", ["128"]),
    ({"cache_salt": "a\nb"}, "cache_salt", ["a\\nb", "printable"]),
    ({"cache_salt": "a\u202eb"}, "cache_salt", ["printable"]),
    # fields that cannot be honoured
    ({"tools": "f"}, "tools", ['"f"', "an array"]),
    ({"tool_choice": "required"}, "tool_choice", ["no tools"]),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", ["required"]),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", ["1", "true or false"]),
    ({"best_of": 2}, "best_of", ["2", "1"]),
    (
        message(role="assistant", tool_calls=[CALL | {"function": {"name": "f", "arguments": []}}]),
        "messages[1].tool_calls[0].function.arguments",
        ["an array", "a string"],
    ),
    (
        part(type="image_url", image_url={"url": "u", "detail": "tiny"}),
        "messages[0].content[0].image_url.detail",
        ['"tiny"', "'low'"],
    ),
    ({"modalities": ["text", "audio"]}, "modalities", ["not supported"]),
    ({"audio": {"voice": "x"}}, "audio", ["not supported"]),
    ({"prediction": {"type": "content"}}, "prediction", ["not supported"]),
    ({"store": True}, "store", ["true", "false"]),
    ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking", ['"yes"']),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", ["not supported"]),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", ["5", "an object"]),
    ({"model": 5}, "model", ["5", "a string"]),
    # messages
    ({"messages": []}, "messages", ["1"]),
    ({"messages": None}, "messages", ["null", "an array"]),
    ({"messages": "Hi"}, "messages", ['"Hi"', "an array"]),
    ({"messages": [USER] * 4097}, "messages", ["4096", "4097"]),
    ({"messages": ["Hi"]}, "messages[0]", ['"Hi"', "an object"]),
    (message(content="x"), "messages[1].role", ["required"]),
    (message(role="robot", content="x"), "messages[1].role", ['"robot"', "developer"]),
    (message(role=5, content="x"), "messages[1].role", ["5", "developer"]),
    (message(role="user"), "messages[1].content", ["required"]),
    (message(role="user", content=5), "messages[1].content", ["5", "a string or an array"]),
    (message(role="user", content={"type": "text"}), "messages[1].content", ["an object"]),
    (message(role="user", content="x", name=5), "messages[1].name", ["5", "a string"]),
    (message(role="tool", content="x"), "messages[1].tool_call_id", ["required"]),
    (message(role="tool", content="x", tool_call_id=""), "messages[1].tool_call_id", ["1 character"]),
    (message(role="function", content="x"), "messages[1].name", ["required"]),
    (message(role="assistant", content=False), "messages[1].content", ["false"]),
    (message(role="assistant", tool_calls={}), "messages[1].tool_calls", ["an array"]),
    (message(role="assistant", tool_calls=[{"type": "function"}]), "messages[1].tool_calls[0].id", ["required"]),
    (message(role="assistant", tool_calls=[CALL | {"type": "x"}]), "messages[1].tool_calls[0].type", ['"x"']),
    (message(role="assistant", tool_calls=[{"id": "c1"}]), "messages[1].tool_calls[0].function", ["required"]),
    (message(role="assistant", content="x", audio={"id": "a"}), "messages[1].audio", ["null"]),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", ['"x"', "an object"]),
    (part(text="x"), "messages[0].content[0].type", ["required"]),
    (part(type=5), "messages[0].content[0].type", ["5", "image_url"]),
    (part(type="hologram"), "messages[0].content[0].type", ['"hologram"', "image_url"]),
    (part(type="text"), "messages[0].content[0].text", ["required"]),
    (part(type="text", text=5), "messages[0].content[0].text", ["5", "a string"]),
    (part(type="image_url"), "messages[0].content[0].image_url", ["required"]),
    (part(type="image_url", image_url=5), "messages[0].content[0].image_url", ["5", "an object"]),
    (part(type="image_url", image_url={}), "messages[0].content[0].image_url.url", ["required"]),
    (part(type="image_url", image_url=""), "messages[0].content[0].image_url.url", ["1 character"]),
    (part(type="input_audio", input_audio={"data": ""}), "messages[0].content[0]", ["audio", "text, image"]),
    (part(type="file", file={}), "messages[0].content[0]", ["file", "text, image"]),
]


@pytest.mark.parametrize(("fields", "param", "named"), BAD_FIELDS, ids=lambda value: str(value)[:60])
def test_invalid_field_is_a_400_that_names_the_field(chat, backend, fields, param, named):
    assert_refused(chat(**fields), backend, param, named)


def test_a_missing_model_or_messages_is_a_400(send):
    for body, param in [({"messages": [USER]}, "model"), ({"model": "org/demo"}, "messages")]:
        response = send("POST", "/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_error_message_quotes_a_long_value_in_short(chat):
    error = chat(reasoning_effort="x" * 10_000).json()["error"]
    assert len(error["message"]) < 250


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": None, "tool_choice": None, "functions": [], "function_call": "none"},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}},
        {"n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"user": "ann", "store": False, "metadata": {"team": "a"}, "service_tier": "auto", "verbosity": "medium"},
        {
            "prompt_cache_key": "k",
            "stop": "",
            "max_tokens": -1,
            "best_of": 1,
            "functions": [],
            "add_generation_prompt": True,
        },
        {"reasoning_effort": None, "audio": None, "prediction": None, "safety_identifier": None},
        {"temperature": None, "top_p": None, "seed": None, "stop": None, "max_tokens": None, "stream_options": None},
    ],
)
def test_no_op_field_values_are_accepted(chat, backend, fields):
    assert chat(**fields).status_code == 200
    request, _ = backend.requests[0]
    assert (request.temperature, request.seed, request.stop, request.max_tokens) == (None, None, (), None)


def test_every_field_that_is_honoured_reaches_the_backend(chat, backend):
    fields = {"temperature": 0, "top_p": 1, "top_k": 40, "min_p": 0.5, "seed": 5, "stop": ["a", "b"], "max_tokens": 9}
    assert chat(**fields, chat_template_kwargs={"enable_thinking": False}).status_code == 200
    request, route = backend.requests[0]
    assert route is Route.TEXT
    assert {name: getattr(request, name) for name in fields} == fields | {"stop": ("a", "b")}
    assert request.thinking == Thinking("off", field="chat_template_kwargs.enable_thinking")


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"seed": -(2**63)}, "seed", 2**63),
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"stop": "x" * 256}, "stop", ("x" * 256,)),
        ({"stop": []}, "stop", ()),
        ({"max_completion_tokens": 9}, "max_tokens", 9),
        ({"max_tokens": 9, "max_completion_tokens": 9}, "max_tokens", 9),
        ({"top_p": 0}, "top_p", 0),
        ({"chat_template_kwargs": {}}, "thinking", None),
        ({"reasoning_effort": "low"}, "thinking", Thinking("on", 1024, "low")),
        ({"reasoning_effort": "none"}, "thinking", Thinking("off")),
        ({"enable_thinking": True, "thinking_budget": 7}, "thinking", Thinking("on", 7, field="thinking_budget")),
        ({"thinking": {"type": "adaptive"}}, "thinking", Thinking("auto", field="thinking.type")),
        ({"reasoning": {"max_tokens": 9}}, "thinking", Thinking("on", 9, field="reasoning.max_tokens")),
        ({"tools": [TOOL]}, "tools", (Tool("f", "F", SCHEMA),)),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", ToolChoice("required")),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            ToolChoice("required", ("f",)),
        ),
        ({"functions": [TOOL["function"]]}, "tools", (Tool("f", "F", SCHEMA),)),
        (
            {"functions": [TOOL["function"]], "function_call": {"name": "f"}},
            "tool_choice",
            ToolChoice("required", ("f",)),
        ),
        ({"guided_choice": ["a", 'b"']}, "grammar", GrammarSpec("lark", CHOICE, "guided_choice")),
        ({"guided_json": SCHEMA}, "grammar", GrammarSpec("json_schema", json.dumps(SCHEMA), "guided_json")),
        ({"structured_outputs": {"json_object": True}}, "grammar", GrammarSpec("json_object", "", OBJECT_FIELD)),
    ],
)
def test_wire_value_becomes_the_canonical_value(chat, backend, fields, name, value):
    assert chat(**fields).status_code == 200
    assert getattr(backend.requests[0][0], name) == value


def test_messages_arrive_normalized(chat, backend):
    messages = [USER, {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "You?"}]
    assert chat(messages=messages).status_code == 200
    assert backend.requests[0][0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n\nYou?"},
    )


def test_the_system_policy_and_volatile_patterns_are_configurable(chat, backend, make_app):
    late = [USER, {"role": "system", "content": "Now: 12:00\nlate"}]
    error = chat(app=make_app(system_policy="error"), messages=late).json()["error"]
    assert error["param"] == "messages[1].role"
    chat(app=make_app(system_policy="inline", volatile_patterns=["^Now:"]), messages=late)
    assert backend.requests[0][0].messages == ({"role": "user", "content": "Hi\n\n[system] late"},)


def test_history_with_tool_calls_and_results_is_accepted_and_normalized(chat, backend):
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}], "refusal": None, "annotations": []},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "Hm."},
        {"role": "tool", "content": [{"type": "image_url", "image_url": IMAGE_URL}], "tool_call_id": "c1"},
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "content": "42", "name": "f"},
    ]
    assert chat(messages=messages).status_code == 200
    request, route = backend.requests[0]
    assert route is Route.MLLM
    call = {"id": "call_5", "type": "function", "function": CALL["function"]}
    assert request.messages == (
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        messages[2],
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
        {"role": "tool", "content": [image_part(IMAGE_URL)], "tool_call_id": "c1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "call_5", "name": "f"},
    )


def image_part(url: str, **fields: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


@pytest.mark.parametrize(
    ("sent", "canonical"),
    [
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "user", "content": "x", "id": "m1", "foo": 1}, {"role": "user", "content": "x"}),
        ({"role": "user", "content": "x", "name": "Ann"}, {"role": "user", "content": "[Ann] x"}),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "output_text", "text": "y"}]},
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        ),
        ({"role": "assistant", "content": "x", "refusal": "No."}, {"role": "assistant", "content": "x"}),
        ({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": "No."}),
        (
            {"role": "assistant", "content": "x", "reasoning": "Hm."},
            {"role": "assistant", "content": "x", "reasoning_content": "Hm."},
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "x"}], "reasoning_content": "Hm."},
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
        ),
        (
            {"role": "assistant", "content": "x", "provider_specific_fields": {"refusal": None}, "annotations": []},
            {"role": "assistant", "content": "x"},
        ),
        (
            {"role": "tool", "tool_call_id": "c", "content": None, "name": "f"},
            {"role": "tool", "tool_call_id": "c", "content": "", "name": "f"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ),
    ],
)
def test_a_message_arrives_in_the_fields_that_templates_read(chat, backend, sent, canonical):
    before = {"role": "assistant" if sent["role"] == "user" else "user", "content": "before"}
    assert chat(messages=[before, sent]).status_code == 200
    assert backend.requests[0][0].messages[1:] == (canonical,)


@pytest.mark.parametrize(
    ("picture", "canonical"),
    [
        ({"type": "image_url", "image_url": {"url": IMAGE_URL, "detail": "high"}}, image_part(IMAGE_URL)),
        (
            {"type": "image_url", "image_url": {"url": IMAGE_URL, "detail": "low", "format": "png"}},
            image_part(IMAGE_URL, detail="low"),
        ),
        ({"type": "image_url", "image_url": IMAGE_URL}, image_part(IMAGE_URL)),
        ({"type": "input_image", "image_url": IMAGE_URL, "detail": "low"}, image_part(IMAGE_URL, detail="low")),
        ({"type": "image", "image": IMAGE_URL}, image_part(IMAGE_URL)),
    ],
)
def test_images_of_all_forms_become_canonical_and_take_the_media_route(chat, backend, picture, canonical):
    text = {"type": "text", "text": "What?"}
    assert chat(messages=[{"role": "user", "content": [picture, text]}]).status_code == 200
    assert backend.requests[0][1] is Route.MLLM
    assert list(backend.requests[0][0].messages) == [{"role": "user", "content": [canonical, text]}]


def test_unknown_fields_are_named_in_a_header_and_counted(chat, send, make_app):
    app = make_app()
    for fields in ({"keep_alive": 5, "a,b\n": 1}, {"keep_alive": 5, "stream": True}):
        response = chat(app=app, **fields)
        assert response.status_code == 200
        assert response.headers["x-orchard-ignored"].startswith("keep_alive")
    assert "x-orchard-ignored" not in chat(app=app).headers
    assert send("GET", "/v1/status", app=app).json()["ignored_fields"] == {"keep_alive": 2, "a,b\n": 1}
    refused = chat(app=make_app(unknown_fields="refuse"), keep_alive=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "keep_alive")


def test_configured_alias_of_the_model_is_accepted(chat, backend, make_app):
    response = chat(app=make_app(served_model_names=("claude-x",)), model="claude-x")
    assert (response.status_code, response.json()["model"]) == (200, "org/demo")


def test_usage_counts_the_tokens_of_all_choices(chat, backend):
    backend.script = [TextDelta("Hel", 1), TextDelta("A", 2, "stop", index=1), TextDelta("lo", 4, "stop")]
    assert chat(n=2).json()["usage"]["completion_tokens"] == 7


def test_calls_and_thoughts_of_an_answer_have_their_own_fields(chat, backend):
    call = ToolCall("call_1", "f", '{"x": 1}')
    backend.script = [
        TextDelta("", 1, reasoning="Hm", num_reasoning_tokens=1),
        TextDelta("Wait.", 1),
        TextDelta("", 2, "tool_calls", tool_calls=(call,)),
    ]
    body = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    whole = chat(tools=[TOOL]).json()
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["tool_calls"]) == ("Wait.", "Hm", [body])
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
    *chunks, done = sse(chat(tools=[TOOL], stream=True))
    sent = [json.loads(chunk)["choices"][0] for chunk in chunks[1:]]
    assert [choice["delta"] for choice in sent] == [
        {"reasoning_content": "Hm"},
        {"content": "Wait."},
        {"tool_calls": [{"index": 0, **body, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": 1}'}}]},
        {},
    ]
    assert (sent[-1]["finish_reason"], done) == ("tool_calls", "[DONE]")


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Writes."}}


def in_grammar(definition: str, syntax: str = "regex") -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {**PATCH["custom"], "format": form}}


def test_a_call_of_a_custom_tool_has_its_text(chat, backend):
    calls = (ToolCall("call_1", "patch", '{"input": "a\\nb"}'), ToolCall("call_2", "f", "{}"))
    backend.script = [TextDelta("", 2, "tool_calls", tool_calls=calls)]
    custom = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    function = {"id": "call_2", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [PATCH, TOOL]
    assert chat(tools=tools).json()["choices"][0]["message"]["tool_calls"] == [custom, function]
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in sse(chat(tools=tools, stream=True))[1:-1]]
    assert [delta["tool_calls"] for delta in deltas if "tool_calls" in delta] == [
        [{"index": 0, **custom, "custom": {"name": "patch", "input": ""}}],
        [{"index": 0, "custom": {"input": "a\nb"}}],
        [{"index": 1, **function, "function": {"name": "f", "arguments": ""}}],
        [{"index": 1, "function": {"arguments": "{}"}}],
    ]


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_the_parts_of_a_call_are_sent_as_they_come(chat, backend, is_cut_off):
    calls = [
        ToolCall("call_1", "f", '{"x": "one\\ntwo"}'),
        ToolCall("call_2", "patch", '{"input": "a\\n{\\"b\\"}"}'),
    ]
    parts = [*parts_of(calls[0], 1, 9), *parts_of(calls[1], 4, 12, 14, 15, is_cut_off=is_cut_off)]
    finish = "length" if is_cut_off else "tool_calls"
    backend.script = [*(TextDelta("", 1, tool_calls=(part,)) for part in parts), TextDelta("", 0, finish)]
    first, second = chat(tools=[PATCH, TOOL]).json()["choices"][0]["message"]["tool_calls"]
    assert first["function"]["arguments"] == calls[0].arguments
    assert second["custom"]["input"] == ("a\n{" if is_cut_off else 'a\n{"b"}')
    texts: dict[int, list[str]] = {0: [], 1: []}
    for chunk in sse(chat(tools=[PATCH, TOOL], stream=True))[1:-1]:
        for one in json.loads(chunk)["choices"][0]["delta"].get("tool_calls", ()):
            assert ("id" in one) == (not texts[one["index"]])
            texts[one["index"]].append(one["function"]["arguments"] if one["index"] == 0 else one["custom"]["input"])
    assert texts[0] == ["", "{", '"x": "on', 'e\\ntwo"}']
    assert "".join(texts[1]) == second["custom"]["input"] and texts[1][:3] == ["", "a", "\n"]


def test_a_custom_tool_and_its_calls_reach_the_model_as_a_function(chat, backend):
    call = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Done."}
    choice = {"type": "custom", "custom": {"name": "patch"}}
    chat(messages=[USER, answer, result], tools=[in_grammar("[a-z]+"), TOOL], tool_choice=choice)
    request = backend.requests[0][0]
    patch = request.tools[0]
    assert (patch.name, list(patch.parameters["properties"]), patch.input_grammar.text) == (
        "patch",
        ["input"],
        "[a-z]+",
    )
    assert request.tool_choice == ToolChoice("required", ("patch",))
    assert request.messages[1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "a\\nb"}'}


def test_image_for_a_text_only_model_is_refused_by_its_path(chat, make_app):
    picture = {"type": "image_url", "image_url": IMAGE_URL}
    messages = [USER, USER, {"role": "user", "content": [{"type": "text", "text": "What?"}, picture]}]
    error = chat(app=make_app(media_kinds=frozenset()), messages=messages).json()["error"]
    assert error["param"] == "messages[2].content[1]"
    assert "image" in error["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
        {"type": "input_video", "video_url": "https://example.com/a.mp4"},
        {"type": "video", "video": "https://example.com/a.mp4"},
    ],
)
def test_videos_of_all_forms_become_canonical_where_the_model_reads_them(chat, backend, make_app, part):
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
    refused = chat(messages=messages)
    assert refused.status_code == 400
    assert "video input, but this model accepts only: text, image" in refused.json()["error"]["message"]
    assert chat(app=make_app(media_kinds=frozenset({"image", "video"})), messages=messages).status_code == 200
    [(request, route)] = backend.requests
    assert route is Route.MLLM
    assert request.messages[0]["content"][0] == {
        "type": "video_url",
        "video_url": {"url": "https://example.com/a.mp4"},
    }


def test_unknown_model_is_not_found(chat, send):
    for response in (chat(model="gpt-9"), send("GET", "/v1/models/gpt-9")):
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert "gpt-9" in error["message"]
        assert "org/demo" in error["message"]


def test_models_are_listed_and_found(send, make_app):
    app = make_app()
    (card,) = send("GET", "/v1/models", app=app).json()["data"]
    assert (card["id"], card["object"]) == ("org/demo", "model")
    assert send("GET", "/v1/models/org/demo", app=app).json() == card
    assert send("GET", "/v1/models/org%2Fdemo", app=app).json() == card


def test_health_follows_readiness_and_status_shows_the_backend_and_unread_bodies(send, backend):
    assert send("GET", "/health/live").status_code == 200
    assert send("GET", "/health/ready").json() == {"status": "ready"}
    backend.unready = "The weights are loading: 40 %."
    response = send("GET", "/health/ready")
    assert (response.status_code, response.json()["reason"]) == (503, backend.unready)
    assert send("GET", "/health/live").status_code == 200
    bodies = {"num_unread": 0, "unread_bytes": 0}
    page = send("GET", "/v1/status").json()
    answers = {"errors": {}, "refusals": {}, "keys": {}}
    assert page == {"num_running": 3, "bodies": bodies, "ignored_fields": {}, "answers": answers}


def test_cache_can_be_shown_and_cleared(send, backend):
    assert send("GET", "/v1/cache").json() == {"totals": {"entries": 4}}
    assert backend.num_entries == 4
    assert send("DELETE", "/v1/cache").json() == {"cleared": {"entries": 4}}
    assert send("GET", "/v1/cache").json() == {"totals": {"entries": 0}}


def test_a_request_before_the_model_is_loaded_is_a_503_with_the_reason(chat, backend):
    backend.start_script = [EngineFailed("gone")]
    backend.unready = "The weights are loading: 40 %."
    for stream in (False, True):
        response = chat(stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert "40 %" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1


def test_a_whole_answer_has_the_shape_of_openai(chat, backend):
    body = chat().json()
    assert body.pop("id") == backend.requests[0][0].request_id
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "org/demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def sse(response):
    *events, end = response.text.split("\n\n")
    assert end == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def test_a_stream_has_the_shape_of_openai(chat, backend):
    response = chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = sse(response)
    assert done == "[DONE]"
    first, *middle, last, usage = map(json.loads, chunks)
    assert {chunk["id"] for chunk in (first, *middle, last, usage)} == {backend.requests[0][0].request_id}
    assert {chunk["object"] for chunk in (first, *middle, last, usage)} == {"chat.completion.chunk"}
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert [chunk["choices"][0]["delta"] for chunk in middle] == [{"content": "Hel"}, {"content": "lo"}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in (first, *middle, last)] == [None, None, None, "stop"]
    assert last["choices"][0]["delta"] == {}
    assert all(chunk["usage"] is None for chunk in (first, *middle, last))
    assert usage["choices"] == []
    assert usage["usage"] == USAGE


def test_stream_without_requested_usage_has_no_usage(chat):
    assert "usage" not in chat(stream=True).text


@pytest.mark.parametrize("text", ['"\\quoted"\n\n', "data: [DONE]\n\n", "\x00\u2028", "😀", "‮", "</script>"])
def test_stream_has_the_text_and_finish_reason_of_the_whole_answer(chat, backend, text):
    backend.script = [TextDelta(text, 1), TextDelta(text, 1, "length")]
    choice = chat().json()["choices"][0]
    chunks = [json.loads(event)["choices"][0] for event in sse(chat(stream=True))[:-1]]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == choice["message"]["content"] == text * 2
    assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "length"
