"""Input items of all kinds -> canonical messages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.http.parsed_request import ReadingRules
from deployments.http.responses.sealed import MAX_SEALED_BYTES, seal
from deployments.requests import Route
from engine.errors import InvalidRequest
from tests.deployments.http.responses.conftest import messages_for, parse

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Bonn"}'}
CALL_B = {**CALL, "call_id": "call_2"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


def call(id: str, name: str = "weather") -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"city": "Bonn"}'}}


def reasoning(**fields) -> dict:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


@pytest.mark.parametrize("text", ["Hi", ""])
def test_a_string_is_one_user_message(text):
    assert parse(input=text).request.messages == ({"role": "user", "content": text},)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "message", "role": "user", "content": "Hi", "id": "msg_any", "status": "completed"},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": {}}], "opts": 1},
    ],
)
def test_a_message_is_the_same_in_all_its_forms(item):
    assert messages_for(item) == [USER]


def test_roles_become_canonical_and_instructions_come_first():
    items = [{"role": "developer", "content": "D"}, {"role": "system", "content": "S"}, USER]
    assert messages_for(*items, instructions="I") == [{"role": "system", "content": "I\n\nD\n\nS"}, USER]


def test_parts_of_a_message_become_canonical_parts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}, {**IMAGE, "detail": "high"}]
    request = parse(input=[{"role": "user", "content": parts}])
    image = {"type": "image_url", "image_url": {"url": IMAGE["image_url"]}}
    assert request.request.messages[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        image,
    ]
    assert request.route == Route.MLLM


@pytest.mark.parametrize(
    ("part", "detail"),
    [
        (IMAGE, {}),
        ({**IMAGE, "detail": "auto"}, {}),
        ({**IMAGE, "detail": "low"}, {"detail": "low"}),
        ({**IMAGE, "image_url": {"url": IMAGE["image_url"], "detail": "low"}}, {"detail": "low"}),
    ],
)
def test_low_detail_of_an_image_is_kept(part, detail):
    (message,) = messages_for({"role": "user", "content": [part]})
    assert message["content"] == [{"type": "image_url", "image_url": {"url": IMAGE["image_url"], **detail}}]


def test_items_of_one_turn_are_one_assistant_message():
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]}
    thought = reasoning(content=[{"type": "reasoning_text", "text": "hm"}])
    turn = messages_for(USER, thought, said, CALL, CALL_B, OUTPUT, {**OUTPUT, "call_id": "call_2"})
    assert turn == [
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [call("call_1"), call("call_2")],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        {"role": "tool", "content": "rain", "tool_call_id": "call_2"},
    ]


def test_calls_without_text_have_null_content():
    assert messages_for(USER, CALL, OUTPUT)[1] == {"role": "assistant", "content": None, "tool_calls": [call("call_1")]}


def test_a_thought_behind_text_begins_another_message():
    said = {"role": "assistant", "content": "a"}
    thought = reasoning(content=[{"type": "reasoning_text", "text": "hm"}])
    assert [m.get("reasoning_content") for m in messages_for(USER, said, thought, CALL, OUTPUT)] == [
        None,
        None,
        "hm",
        None,
    ]


def test_a_call_in_a_namespace_has_its_full_name():
    assert messages_for(USER, {**CALL, "namespace": "agents"}, OUTPUT)[1]["tool_calls"] == [
        call("call_1", "agents.weather")
    ]


def test_arguments_may_come_as_an_object():
    assert messages_for({**CALL, "arguments": {"city": "Bonn"}})[0]["tool_calls"] == [call("call_1")]


def test_an_output_may_hold_images():
    output = [{"type": "input_text", "text": "see"}, {**IMAGE, "detail": "high"}]
    assert messages_for(CALL, {**OUTPUT, "output": output})[1]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": IMAGE["image_url"]}},
    ]


@pytest.mark.parametrize(
    ("fields", "thought"),
    [
        ({"content": [{"type": "reasoning_text", "text": "c"}], "summary": [{"text": "s"}]}, "c"),
        ({"summary": [{"type": "summary_text", "text": "s"}, {"type": "summary_text", "text": "t"}]}, "s\n\nt"),
        ({"encrypted_content": seal("sealed"), "summary": [{"text": "s"}], "content": None}, "sealed"),
        ({"encrypted_content": "gAAAAA", "summary": [{"text": "s"}]}, "s"),
    ],
)
def test_reasoning_is_read_from_content_before_encrypted_content_and_summary(fields, thought):
    assert messages_for(USER, reasoning(**fields), CALL)[1]["reasoning_content"] == thought


def test_encrypted_reasoning_of_another_server_is_dropped():
    assert messages_for(USER, reasoning(encrypted_content="gAAAAA"), USER) == [{"role": "user", "content": "Hi\n\nHi"}]


@settings(deadline=None)
@given(st.text())
def test_sealed_thought_opens_to_the_same_thought(text):
    assert messages_for(reasoning(encrypted_content=seal("x" + text)))[0]["reasoning_content"] == "x" + text


@pytest.mark.parametrize("sealed", ["orchard1.", "orchard1.!", "orchard1.AAAA", seal("a")[:-6], seal("\ud7ff")[:-9]])
def test_a_broken_sealed_thought_is_refused(sealed):
    with pytest.raises(InvalidRequest, match=r"`input\[0\]\.encrypted_content` is .* must be sent back unchanged"):
        messages_for(reasoning(encrypted_content=sealed))


def test_sealed_thoughts_are_limited_alone_and_together():
    full = reasoning(encrypted_content=seal("a" * MAX_SEALED_BYTES))
    assert len(messages_for(full, full)[0]["reasoning_content"]) == 2 * MAX_SEALED_BYTES + 2
    for items in [[reasoning(encrypted_content=seal("a" * (MAX_SEALED_BYTES + 1)))], [full] * 3]:
        with pytest.raises(InvalidRequest, match=str(MAX_SEALED_BYTES)) as refused:
            messages_for(*items)
        assert refused.value.field == f"input[{len(items) - 1}].encrypted_content"


BAD_ITEMS = [
    ({"type": "custom_tool_call", "call_id": "c", "name": "n"}, "input[0].input", "required"),
    ({"type": "quantum_call", "id": "q_1"}, "input[0].type", "quantum_call"),
    ({"type": 5}, "input[0].type", "5"),
    ({"role": "tool", "content": "x"}, "input[0].role", "tool"),
    ({"content": "x"}, "input[0].role", "required"),
    ({**CALL, "call_id": ""}, "input[0].call_id", '""'),
    ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[0].name", "required"),
    ({**CALL, "arguments": 3}, "input[0].arguments", "3"),
    ({"type": "function_call_output", "call_id": "c"}, "input[0].output", "required"),
    ({"role": "user", "content": 3}, "input[0].content", "a string or an array"),
    ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input[0].content[0].type", "input_file"),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "input[0].content[0].type", "input_audio"),
    (
        {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]},
        "input[0].content[0].image_url",
        "required",
    ),
    ({"role": "user", "content": [{**IMAGE, "detail": "huge"}]}, "input[0].content[0].detail", "huge"),
    ({"role": "assistant", "content": [IMAGE]}, "input[0].content[0]", "assistant"),
    ("Hi", "input[0]", "an object"),
]


@pytest.mark.parametrize(("item", "field", "named"), BAD_ITEMS)
def test_unsupported_item_is_refused_by_its_path(item, field, named):
    with pytest.raises(InvalidRequest) as refused:
        messages_for(item)
    assert refused.value.field == field
    assert f"`{field}`" in refused.value.message
    assert named in refused.value.message


@pytest.mark.parametrize(
    ("item", "path"),
    [
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}, "input[0].content[1]"),
        ({**OUTPUT, "output": [IMAGE]}, "input[0].output[0]"),
    ],
)
def test_a_model_of_text_refuses_images(item, path):
    with pytest.raises(InvalidRequest, match="accepts only: text") as refused:
        parse(ReadingRules("org/demo", frozenset()), input=[item])
    assert refused.value.field == path


def test_empty_input_list_is_refused():
    with pytest.raises(InvalidRequest) as refused:
        messages_for()
    assert refused.value.field == "input"


def test_late_developer_item_follows_the_system_policy():
    items = [USER, {"role": "developer", "content": "D"}]
    inline = parse(ReadingRules("org/demo", frozenset(), system_policy="inline"), input=items)
    assert inline.request.messages == ({"role": "user", "content": "Hi\n\n[system] D"},)
    with pytest.raises(InvalidRequest, match="developer") as refused:
        parse(ReadingRules("org/demo", frozenset(), system_policy="error"), input=items)
    assert refused.value.field == "input"


def test_item_reference_marks_the_conversation_as_open():
    for item in [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}]:
        parsed = parse(input=[item])
        assert parsed.echo.is_open
        assert parsed.echo.references == ("msg_1",)
        assert parsed.request.messages == ()
