"""The fields of a request for a response: honoured, neutral, informational, refused or unknown."""

import pickle

import pytest

from deployments.http.errors import ModelNotFound
from deployments.http.parsed_request import ReadingRules
from deployments.http.request_reader import read_request
from deployments.requests import Thinking, ToolChoice
from engine.errors import InvalidRequest
from engine.protocol import GrammarSpec
from tests.deployments.http.responses.conftest import RULES, parse

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "é"}}}
SCHEMA_TEXT = '{"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "é"}}}'
FUNCTION = {"type": "function", "name": "weather"}


HONOURED = [
    ({"max_output_tokens": 1}, {"max_tokens": 1}),
    ({"max_output_tokens": -1}, {"max_tokens": None}),
    ({"temperature": 0}, {"temperature": 0}),
    ({"top_p": 0.5}, {"top_p": 0.5, "temperature": None}),
    ({"top_p": 0}, {"top_p": 0, "temperature": None}),
    ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    ({"parallel_tool_calls": None}, {"parallel_tool_calls": True}),
    ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {"grammar": None}),
    ({"text": {"format": {"type": "json_object"}}}, {"grammar": GrammarSpec("json_object", field="text.format")}),
    (
        {"text": {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}}},
        {"grammar": GrammarSpec("json_schema", SCHEMA_TEXT, "text.format")},
    ),
    (  # the answer is a call, and no text
        {"text": {"format": {"type": "json_object"}}, "tools": [FUNCTION], "tool_choice": "required"},
        {"grammar": None, "tool_choice": ToolChoice("required")},
    ),
    ({"reasoning": None}, {"thinking": None}),
    ({"reasoning": {"summary": "auto"}}, {"thinking": None}),
    ({"reasoning": {"effort": "none"}}, {"thinking": Thinking("off", field="reasoning.effort")}),
    ({"reasoning": {"effort": "minimal"}}, {"thinking": Thinking("off", field="reasoning.effort")}),
    ({"reasoning": {"effort": "low"}}, {"thinking": Thinking("on", 1024, "low", "reasoning.effort")}),
    ({"reasoning": {"effort": "medium"}}, {"thinking": Thinking("on", 8192, "medium", "reasoning.effort")}),
    ({"reasoning": {"effort": "high"}}, {"thinking": Thinking("on", None, "high", "reasoning.effort")}),
    ({"reasoning": {"effort": "xhigh"}}, {"thinking": Thinking("on", None, "high", "reasoning.effort")}),
    ({"user": "u"}, {"client": "u"}),
    ({"safety_identifier": "s", "user": "u"}, {"client": "s"}),
    ({"cache_salt": "salt"}, {"tenant": "salt", "client": "salt"}),
]


@pytest.mark.parametrize(("fields", "expected"), HONOURED)
def test_an_honoured_field_reaches_the_request(fields, expected):
    request = parse(**fields).request
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"include": []},
        {"include": ["reasoning.encrypted_content"]},
        {"store": False},
        {"store": True},
        {"background": False},
        {"truncation": "disabled"},
        {"service_tier": "auto"},
        {"top_logprobs": 0},
        {"metadata": {"team": "a"}},
        {"prompt_cache_key": "k" * 1024},
        {"client_metadata": {"session": "s" * 750}},
        {"prompt_cache_retention": "24h"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"reasoning": {"summary": "auto", "context": "auto", "mode": "standard"}},
        *({name: None} for name in ("background", "conversation", "prompt", "tools", "tool_choice", "text", "include")),
    ],
)
def test_no_op_field_value_is_accepted_and_not_reported(fields):
    assert parse(**fields).ignored == ()


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"truncation": "auto"}, "truncation"), ({"text": {"verbosity": "low"}}, "text.verbosity")],
)
def test_hint_is_accepted_and_reported_as_ignored(fields, name):
    assert parse(**fields).ignored == (name,)


REFUSED = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": []}, "context_management"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"access_programs": {}}, "access_programs"),
    ({"image": {}}, "image"),
    ({"moderation": {}}, "moderation"),
    ({"truncation": "none"}, "truncation"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"text": {"verbosity": "lowest"}}, "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"reasoning": {"context": "some_turns"}}, "reasoning.context"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"budget": 3}}, "reasoning.budget"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"include": ["reasoning.encrypted_content", "x"]}, "include[1]"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"client_metadata": {"a": "x" * 20_000}}, "client_metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": -2}, "max_output_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"previous_response_id": ""}, "previous_response_id"),
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"instructions": ["x"]}, "instructions"),
    ({"store": "yes"}, "store"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_unsupported_field_is_refused_by_name(fields, field):
    with pytest.raises(InvalidRequest) as refused:
        parse(**fields)
    assert refused.value.field == field
    assert f"`{field}`" in refused.value.message


def test_unknown_model_is_not_found_and_an_alias_is_accepted():
    with pytest.raises(ModelNotFound):
        parse(model="gpt-5.5")
    assert parse(ReadingRules("org/demo", frozenset(), aliases=frozenset({"gpt-5.5"})), model="gpt-5.5")


def test_unknown_fields_are_reported_or_refused_as_configured():
    assert parse(keep_alive=1, ttl=2).ignored == ("keep_alive", "ttl")
    with pytest.raises(InvalidRequest, match="`keep_alive` is not supported"):
        parse(ReadingRules("org/demo", frozenset(), unknown_fields="refuse"), keep_alive=1)


def test_echo_of_a_packed_request_survives_pickling():
    body = b'{"model": "org/demo", "input": "Hi", "tools": [{"type": "function", "name": "f"}], "metadata": {"a": "b"}}'
    parsed = read_request(body, "responses", RULES)
    assert pickle.loads(pickle.dumps(parsed.packed())).echo == parsed.echo  # noqa: S301 we made it


def test_items_are_kept_for_a_response_that_is_stored():
    assert parse(store=False).echo.items == b"[]"
    assert b"Hi" in parse(store=True).echo.items
