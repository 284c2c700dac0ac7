"""Blocks of Anthropic's messages become canonical messages, and a later turn changes nothing of an earlier one."""

import json
from dataclasses import replace

import pytest

from deployments.http.anthropic.conversation import definition_text
from deployments.http.anthropic.signature import signature_of
from deployments.requests import Route
from engine.errors import InvalidRequest
from engine.processing.message import Part
from tests.deployments.http.anthropic.conftest import RULES, USER, parsed, request_of, tool

BILLING = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def image_at(path: str, url: str = "data:image/png;base64,AA==") -> Part:
    return {"type": "image_url", "image_url": {"url": url}, "field": path}


def text(said, **more):
    return {"type": "text", "text": said, **more}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def use(id="toolu_1", name="find", **arguments):
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def result(content, id="toolu_1", **more):
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def messages_of(*messages, **fields):
    return list(request_of(*messages, **fields).messages)


def test_a_string_and_a_list_of_one_text_block_are_the_same_prompt():
    as_strings = messages_of(USER, {"role": "assistant", "content": "Yes"}, USER, system="Be kind.")
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    as_blocks = messages_of(
        user(text("Hi", **cached)), assistant(text("Yes")), user(text("Hi")), system=[text("Be kind.", **cached)]
    )
    assert as_strings == as_blocks
    assert as_strings[0] == {"role": "system", "content": "Be kind."}


def test_blocks_are_joined_with_a_blank_line():
    messages = messages_of(user(text("a"), text(""), text("b")), system=[text("S1"), text("S2")])
    assert messages == [{"role": "system", "content": "S1\n\nS2"}, {"role": "user", "content": "a\n\nb"}]


def test_billing_line_is_dropped_from_the_system_prompt():
    assert messages_of(system=[text(BILLING), text("S1"), text("S2")]) == messages_of(system=[text("S1"), text("S2")])
    assert messages_of(system=BILLING) == messages_of()
    assert messages_of(system="") == messages_of(system=[]) == messages_of()


def test_images_keep_their_position_among_the_text_blocks():
    parsed_request = parsed(messages=[user(text("a"), text("b"), PNG, text("c"))])
    [message] = parsed_request.request.messages
    assert message["content"] == [text("a\n\nb"), image_at("messages.0.content.2"), text("c")]
    assert parsed_request.route is Route.MLLM
    by_url = {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}
    [message] = messages_of(user(by_url))
    assert message["content"] == [image_at("messages.0.content.0", "https://a.b/c.png")]


def test_image_is_refused_by_path_when_the_model_reads_only_text():
    blind = replace(RULES, media_kinds=frozenset())
    for content, path in ((PNG, "messages.0.content.1"), (result([text("x"), PNG]), "messages.0.content.1.content.1")):
        with pytest.raises(InvalidRequest) as refused:
            parsed(blind, messages=[user(text("a"), content)])
        assert refused.value.field == path
        assert refused.value.message.startswith(f"{path}: ")


def test_assistant_turn_keeps_its_thinking_text_and_tool_calls():
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    [_, said, _] = messages_of(USER, assistant(thought, text("I look."), use(b=1, a={"é": 2})), user(result("r")))
    assert said == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": {"name": "find", "arguments": '{"b": 1, "a": {"é": 2}}'}}
        ],
    }


def test_a_thought_that_was_omitted_comes_back_from_its_signature():
    thought = {"type": "thinking", "thinking": "", "signature": signature_of("Hm, ü.", is_omitted=True)}
    [_, said, _] = messages_of(USER, assistant(thought, text("Yes.")), USER)
    assert said["reasoning_content"] == "Hm, ü."


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "thinking", "thinking": "", "signature": "EqQB"},
        {"type": "thinking", "thinking": "", "signature": "orchard-thought:%%%"},
        {"type": "thinking", "thinking": "", "signature": "orchard-thought:/w=="},
        {"type": "thinking", "thinking": "", "signature": signature_of("Hm.", is_omitted=False)},
        {"type": "thinking", "thinking": ""},
        {"type": "redacted_thinking", "data": "EqQB"},
    ],
)
def test_a_thought_that_cannot_be_read_is_left_out(thought):
    assert messages_of(USER, assistant(thought, text("Yes.")), USER) == messages_of(USER, assistant(text("Yes.")), USER)


def test_results_of_parallel_calls_are_one_message_each_with_the_text_behind_them():
    calls = assistant(use("toolu_1"), use("toolu_2"))
    answers = user(result("one", "toolu_1"), text("Go on."), result([text("two"), text("three"), PNG], "toolu_2"))
    image = image_at("messages.2.content.2.content.2")
    assert messages_of(USER, calls, answers)[2:] == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "one"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": [text("two\n\nthree"), image]},
        {"role": "user", "content": "Go on."},
    ]


def test_results_in_several_user_messages_are_one_turn():
    calls = assistant(use("toolu_1"), use("toolu_2"))
    apart = messages_of(USER, calls, user(result("one")), user(result("two", "toolu_2"), text("Go on.")))
    assert apart == messages_of(USER, calls, user(result("one"), result("two", "toolu_2"), text("Go on.")))


def test_messages_of_the_assistant_in_a_row_are_one_turn():
    apart = messages_of(USER, assistant(text("I look.")), assistant(use()), user(result("r")))
    assert apart == messages_of(USER, assistant(text("I look."), use()), user(result("r")))


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no such file", "[error] no such file"),
        ([text("no such file")], "[error] no such file"),
        ([PNG], [text("[error] "), image_at("messages.2.content.0.content.0")]),
        (None, "[error] "),
    ],
)
def test_the_model_sees_that_a_tool_failed(content, shown):
    [_, _, told] = messages_of(USER, assistant(use()), user(result(content, is_error=True)))
    assert told["content"] == shown


@pytest.mark.parametrize("is_error", [False, None])
def test_tool_result_without_error_has_no_error_mark(is_error):
    [_, _, told] = messages_of(USER, assistant(use()), user(result("fine", is_error=is_error)))
    assert told["content"] == "fine"


def test_tool_result_without_content_is_an_empty_tool_message():
    [_, _, told] = messages_of(USER, assistant(use()), user({"type": "tool_result", "tool_use_id": "toolu_1"}))
    assert told == {"role": "tool", "tool_call_id": "toolu_1", "content": ""}


def test_a_late_system_message_stays_in_place_whatever_the_policy_for_chats_is():
    late = {"role": "system", "content": [text("One."), text("Two.")]}
    for policy in ("hoist", "inline", "error"):
        rules = replace(RULES, system_policy=policy)
        turn = parsed(rules, messages=[USER, late, assistant(use()), user(result("r")), late], system="S").request
        assert [message["role"] for message in turn.messages] == ["system", "user", "assistant", "tool", "user"]
        assert turn.messages[1]["content"] == "Hi\n\n[system] One.\n\nTwo."
        assert turn.messages[4]["content"] == "[system] One.\n\nTwo."


def test_a_late_system_message_is_kept_where_the_template_knows_it():
    rules = replace(RULES, keeps_late_system=True)
    turn = parsed(rules, messages=[USER, {"role": "system", "content": "Be brief."}]).request
    assert turn.messages == (USER, {"role": "system", "content": "Be brief."})


def test_unknown_keys_of_messages_and_blocks_are_dropped():
    strange = {"role": "user", "content": [text("Hi", citations=None, secret={"a": 1})], "id": "m1"}
    assert messages_of(strange) == messages_of(USER)


# deferred tools

SEARCH, FETCH = tool("search"), tool("fetch", defer_loading=True)
REFERENCE = {"type": "tool_reference", "tool_name": "fetch"}
FOUND = [USER, assistant(use(name="search")), user(result([REFERENCE, text("That is all.")]))]


def test_a_deferred_tool_cannot_be_called_before_a_message_refers_to_it():
    before = request_of(USER, tools=[SEARCH, FETCH])
    assert [(tool.name, tool.is_deferred) for tool in before.tools] == [("search", False)]
    after = request_of(*FOUND, tools=[FETCH, SEARCH])
    assert [(tool.name, tool.is_deferred) for tool in after.tools] == [("fetch", True), ("search", False)]


def test_tool_reference_is_replaced_by_the_tool_definition_in_place():
    request = request_of(*FOUND, tools=[FETCH, SEARCH])
    shown = definition_text(request.tools[0])
    assert request.messages[2]["content"] == f"{shown}\n\nThat is all."
    assert json.loads(shown)["function"] == {
        "name": "fetch",
        "description": "Finds.",
        "parameters": {"type": "object", "properties": {}},
    }


def test_tool_reference_leaves_earlier_messages_and_offered_tools_unchanged():
    before = request_of(*FOUND[:1], tools=[SEARCH, FETCH])
    after = request_of(*FOUND, tools=[FETCH, SEARCH])
    assert after.messages[: len(before.messages)] == before.messages
    assert tuple(tool for tool in after.tools if not tool.is_deferred) == before.tools


def test_tool_reference_to_an_undefined_tool_is_refused_by_path():
    with pytest.raises(InvalidRequest, match='Tool reference "fetch" not found') as refused:
        request_of(*FOUND, tools=[SEARCH])
    assert refused.value.field == "messages.2.content.0.content.0.tool_name"


# a final message of the assistant


def test_a_final_message_of_the_assistant_is_continued():
    request = request_of(USER, {"role": "assistant", "content": "Once upon"}, thinking={"type": "adaptive"})
    assert request.continue_final_message
    assert request.messages[-1] == {"role": "assistant", "content": "Once upon"}
    assert request.thinking is not None and request.thinking.mode == "off"


def test_final_assistant_message_without_text_is_not_continued():
    request = request_of(USER, {"role": "assistant", "content": ""})
    assert not request.continue_final_message
    assert request == request_of(USER)


FORM = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("last", "fields", "said"),
    [
        (assistant(text("Once ")), {}, "cannot end with trailing whitespace"),
        (assistant(text("I look."), use()), {}, "without tool_result blocks"),
        (assistant({"type": "thinking", "thinking": "Hm."}), {}, "no text"),
        (assistant(text("{")), {"output_config": {"format": FORM}}, "output_config.format.schema"),
        (assistant(text("A")), {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ],
)
def test_a_final_message_that_cannot_be_continued_is_refused_by_its_path(last, fields, said):
    with pytest.raises(InvalidRequest, match=said) as refused:
        request_of(USER, last, **fields)
    assert refused.value.field == "messages.1"


def test_messages_without_any_content_are_refused():
    with pytest.raises(InvalidRequest, match=r"messages: at least one"):
        request_of({"role": "assistant", "content": []})
