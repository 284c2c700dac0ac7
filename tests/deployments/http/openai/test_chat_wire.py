"""The fields that shape the answer beyond its temperature: from the wire to the ChatRequest, or to a 400."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.http.grammar import MAX_GRAMMAR_CHARS
from deployments.http.openai.chat_wire import (
    ChatCompletionBody,
    parse_chat_completion,
    request_fields,
)
from deployments.http.openai.message_wire import MAX_PARTS, MAX_TOOL_CALLS
from engine.errors import InvalidRequest
from engine.protocol import GrammarSpec
from tests.deployments.http.conftest import assert_refused

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "é"}}, "required": ["z", "a"]}
SCHEMA_FIELD = "response_format.json_schema.schema"


def schema_format(**changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True} | changes}


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def custom(form: Any, name: str = "patch") -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, "format": form}}


def called(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


BAD_FIELDS = [
    # how many answers
    ({"n": 0}, "n", ["0", "greater than or equal to 1"]),
    ({"n": 129}, "n", ["129", "128"]),
    ({"n": True}, "n", ["true", "an integer"]),
    ({"n": 1.0}, "n", ["1.0", "an integer"]),
    ({"n": "2"}, "n", ['"2"', "an integer"]),
    # logprobs
    ({"logprobs": 5}, "logprobs", ["5", "true or false"]),
    ({"logprobs": "true"}, "logprobs", ['"true"', "true or false"]),
    ({"top_logprobs": 5}, "top_logprobs", ["5", "`logprobs`: true"]),
    ({"top_logprobs": 1, "logprobs": False}, "top_logprobs", ["1", "`logprobs`: true"]),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", ["21", "20"]),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", ["-1", "0"]),
    ({"top_logprobs": True, "logprobs": True}, "top_logprobs", ["true", "an integer"]),
    # penalties
    ({"presence_penalty": 2.1}, "presence_penalty", ["2.1", "2"]),
    ({"presence_penalty": -2.1}, "presence_penalty", ["-2.1", "-2"]),
    ({"presence_penalty": "1"}, "presence_penalty", ['"1"', "a number"]),
    ({"frequency_penalty": -3}, "frequency_penalty", ["-3", "-2"]),
    ({"frequency_penalty": 3}, "frequency_penalty", ["3", "2"]),
    ({"frequency_penalty": False}, "frequency_penalty", ["false", "a number"]),
    ({"repetition_penalty": 0}, "repetition_penalty", ["0", "0.01"]),
    ({"repetition_penalty": -1}, "repetition_penalty", ["-1", "0.01"]),
    ({"repetition_penalty": 101}, "repetition_penalty", ["101", "100"]),
    ({"repetition_penalty": [1]}, "repetition_penalty", ["a number"]),
    # biases
    ({"logit_bias": []}, "logit_bias", ["an object"]),
    ({"logit_bias": {"5": 100.5}}, "logit_bias.5", ["100.5", "100"]),
    ({"logit_bias": {"5": -101}}, "logit_bias.5", ["-101", "-100"]),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", ['"1"', "a number"]),
    ({"logit_bias": {"5": None}}, "logit_bias.5", ["null", "a number"]),
    ({"logit_bias": {"5": True}}, "logit_bias.5", ["true", "a number"]),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", ["1024", "1025"]),
    *[
        ({"logit_bias": {"7": 1, key: 1}}, "logit_bias", [json.dumps(key, ensure_ascii=False), "a token id"])
        for key in ("", "x", "-1", "+1", " 1", "1 ", "1.0", "007", "1e3", "1_0", "٣", "5\n", "12345678901")
    ],
    # where it ends
    ({"min_tokens": -1}, "min_tokens", ["-1", "0"]),
    ({"min_tokens": 2**31}, "min_tokens", [str(2**31), str(2**31 - 1)]),
    ({"min_tokens": 1.5}, "min_tokens", ["1.5", "an integer"]),
    ({"stop_token_ids": 5}, "stop_token_ids", ["5", "an array"]),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", ["-1", "0"]),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]", ['"2"', "an integer"]),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]", ["true", "an integer"]),
    ({"stop_token_ids": [2**31]}, "stop_token_ids[0]", [str(2**31)]),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", ["64", "65"]),
    # the queue
    ({"priority": "high"}, "priority", ['"high"', "an integer"]),
    ({"priority": 1.0}, "priority", ["1.0", "an integer"]),
    ({"priority": 2**31}, "priority", [str(2**31), str(2**31 - 1)]),
    ({"priority": -(2**31) - 1}, "priority", [str(-(2**31))]),
    # sparse prompts
    ({"specprefill": "true"}, "specprefill", ['"true"', "true or false"]),
    ({"specprefill": 1}, "specprefill", ["1", "true or false"]),
    ({"specprefill_keep_pct": 0.09}, "specprefill_keep_pct", ["0.09", "0.1"]),
    ({"specprefill_keep_pct": 1.01}, "specprefill_keep_pct", ["1.01", "1"]),
    ({"specprefill_keep_pct": 30}, "specprefill_keep_pct", ["30", "1"]),
    ({"specprefill_keep_pct": "0.3"}, "specprefill_keep_pct", ['"0.3"', "a number"]),
    ({"specprefill_keep_pct": True}, "specprefill_keep_pct", ["true", "a number"]),
    ({"specprefill": False, "specprefill_keep_pct": 0.3}, "specprefill_keep_pct", ["0.3", "`specprefill`: false"]),
    # grammars
    ({"response_format": "json"}, "response_format", ['"json"', "an object"]),
    ({"response_format": {}}, "response_format.type", ["required"]),
    ({"response_format": {"type": 5}}, "response_format.type", ["5", "json_schema"]),
    ({"response_format": {"type": "xml"}}, "response_format.type", ['"xml"', "text, json_object, json_schema"]),
    ({"response_format": {"type": "regex", "regex": "a"}}, "response_format.type", ['"regex"', "json_object"]),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", ["not supported"]),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema", ["not supported"]),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ["required"]),
    ({"response_format": {"type": "json_schema", "schema": 3}}, "response_format.json_schema", ["required"]),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        SCHEMA_FIELD,
        ["required"],
    ),
    ({"response_format": schema_format(name=3)}, "response_format.json_schema.name", ["3", "a string"]),
    ({"response_format": schema_format(name="a" * 513)}, "response_format.json_schema.name", ["512"]),
    ({"response_format": schema_format(schema=json.dumps(SCHEMA))}, SCHEMA_FIELD, ["an object"]),
    ({"response_format": schema_format(schema=True)}, SCHEMA_FIELD, ["true", "an object"]),
    ({"response_format": schema_format(strict="yes")}, "response_format.json_schema.strict", ['"yes"']),
    ({"response_format": schema_format(description=5)}, "response_format.json_schema.description", ["5"]),
    ({"response_format": schema_format(schema_={})}, "response_format.json_schema.schema_", ["not supported"]),
    ({"structured_outputs": []}, "structured_outputs", ["an object"]),
    ({"structured_outputs": {}}, "structured_outputs", ["exactly one of"]),
    ({"structured_outputs": {"regex": None}}, "structured_outputs", ["exactly one of"]),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", ["exactly one of"]),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", ["1 character"]),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", ["5", "a string"]),
    ({"structured_outputs": {"json_": {}}}, "structured_outputs.json_", ["not supported"]),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", ["not supported"]),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        ["`response_format`", "send one of them"],
    ),
    ({"min_tokens": 3, "structured_outputs": {"regex": "a"}}, "min_tokens", ["3", "`structured_outputs`"]),
    ({"min_tokens": 3, "response_format": schema_format()}, "min_tokens", ["3", "`response_format`"]),
    ({"stop_token_ids": [5], "response_format": schema_format()}, "stop_token_ids", ["`response_format`"]),
    # neighbours of these fields in other servers
    ({"prompt_logprobs": 1}, "prompt_logprobs", ["not supported"]),
    ({"use_beam_search": True}, "use_beam_search", ["true", "false"]),
    ({"guided_grammar": "start: x"}, "guided_grammar", ["not supported", "guided_regex"]),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", ["`guided_json`"]),
    ({"guided_choice": []}, "guided_choice", ["1 item"]),
    ({"guided_regex": ""}, "guided_regex", ["1 character"]),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", ["an array"]),
    ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos", ["`guided_regex`"]),
    ({"ignore_eos": "yes"}, "ignore_eos", ["true or false"]),
    # fields that are known and would change the answer
    ({"store": True}, "store", ["true", "false"]),
    ({"service_tier": "flex"}, "service_tier", ['"flex"', '"auto"']),
    ({"verbosity": "lowest"}, "verbosity", ['"lowest"', '"medium"', '"low"', '"high"']),
    ({"audio": {"voice": "x"}}, "audio", ["not supported"]),
    ({"prediction": {"type": "content"}}, "prediction", ["not supported"]),
    ({"web_search_options": {}}, "web_search_options", ["not supported"]),
    ({"metadata": {"a": "x" * 20_000}}, "metadata", ["16384"]),
    # tools
    ({"tools": {}}, "tools", ["an array"]),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", ['"web_search"', "function, custom"]),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom", ["required"]),
    ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "tools[0].custom.name", ['""', "128"]),
    ({"tools": [custom({"type": "json"})]}, "tools[0].custom.format.type", ['"json"', "text, grammar"]),
    ({"tools": [custom({"type": "grammar"})]}, "tools[0].custom.format.grammar", ["required"]),
    (
        {"tools": [custom({"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: nothing"}})]},
        "tools[0].custom.format.grammar.definition",
        ["nothing"],
    ),
    ({"tools": [TOOL, custom(None, name="f")]}, "tools", ["tools[1]", "'f'"]),
    (
        {"tools": [custom(None)], "tool_choice": {"type": "function", "function": {"name": "patch"}}},
        "tool_choice",
        ['the function "patch"', "custom"],
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        "tool_choice",
        ['the custom "f"', "function"],
    ),
    ({"messages": [called({"id": "a", "type": "code"})]}, "messages[0].tool_calls[0].type", ["function, custom"]),
    ({"messages": [called({"id": "a", "type": "custom"})]}, "messages[0].tool_calls[0].custom", ["required"]),
    ({"tools": [{"type": "function"}]}, "tools[0].function", ["required"]),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", ['"a b"', "128"]),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        "tools[0].function.parameters",
        [],
    ),
    ({"tools": [TOOL, TOOL]}, "tools", ["tools[1]", "'f'"]),
    ({"tools": [TOOL], "functions": [{"name": "g"}]}, "functions", ["`tools`"]),
    ({"tool_choice": "required"}, "tool_choice", ["no tools"]),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", ['"always"', '"required"']),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", ["'g'"]),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", ["'g'"]),
    ({"tools": [TOOL], "min_tokens": 3}, "min_tokens", ["3", "`tools`"]),
    # thoughts
    ({"reasoning_effort": "huge"}, "reasoning_effort", ['"huge"', "'low'"]),
    ({"enable_thinking": "yes"}, "enable_thinking", ["true or false"]),
    ({"thinking": {"type": "on"}}, "thinking.type", ['"on"']),
    ({"thinking_budget": -1}, "thinking_budget", ["-1", "0"]),
    ({"enable_thinking": True, "reasoning_effort": "none"}, "enable_thinking", ["`reasoning_effort`", "off"]),
]


@pytest.mark.parametrize(("fields", "param", "named"), BAD_FIELDS, ids=lambda value: str(value)[:60])
def test_invalid_field_is_a_400_that_names_the_field(chat, backend, fields, param, named):
    assert_refused(chat(**fields), backend, param, named)


def test_error_message_quotes_a_long_field_name_in_short(chat):
    for fields in ({"logit_bias": {"9" * 10_000: "x"}}, {"logit_bias": {"9" * 10_000: 1}}):
        error = chat(**fields).json()["error"]
        assert len(error["message"]) < 300
        assert len(error["param"]) < 120


NOTHING_ASKED = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": None,
    "logit_bias": (),
    "min_tokens": 0,
    "logprobs": None,
    "stop_token_ids": (),
    "num_choices": 1,
    "grammar": None,
    "priority": 0,
    "tenant": "",
    "client": "",
    "spec_prefill": None,
    "spec_prefill_keep": None,
    "tools": (),
    "thinking": None,
    "ignore_eos": False,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict.fromkeys(["n", "logprobs", "top_logprobs", "response_format", "structured_outputs", "logit_bias"]),
        dict.fromkeys(["presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "priority"]),
        {"n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "min_tokens": 0, "stop_token_ids": []},
        {"presence_penalty": 0, "frequency_penalty": -0.0, "priority": 0},
        {"response_format": {"type": "text"}, "stop_token_ids": None},
        {"structured_outputs": None, "min_tokens": 0},
        {"cache_salt": None, "user": None},
        {"user": ""},
        {"specprefill": None, "specprefill_keep_pct": None},
    ],
)
def test_no_op_field_values_change_nothing(chat, backend, fields):
    assert chat(**fields).status_code == 200
    request = backend.requests[0][0]
    assert {name: getattr(request, name) for name in NOTHING_ASKED} == NOTHING_ASKED


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"presence_penalty": -2}, "presence_penalty", -2),
        ({"frequency_penalty": 2.0}, "frequency_penalty", 2),
        ({"repetition_penalty": 0.01}, "repetition_penalty", 0.01),
        ({"repetition_penalty": 100}, "repetition_penalty", 100),
        ({"logit_bias": {"17": -100, "0": 100.0, "3": 0.5}}, "logit_bias", ((17, -100), (0, 100), (3, 0.5))),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 0}, "logprobs", 0),
        ({"logprobs": True, "top_logprobs": 20}, "logprobs", 20),
        ({"min_tokens": 7, "response_format": {"type": "text"}}, "min_tokens", 7),
        ({"stop_token_ids": [9, 0, 9]}, "stop_token_ids", (9, 0, 9)),
        ({"priority": -5}, "priority", -5),
        ({"cache_salt": "x"}, "tenant", "x"),
        ({"user": "ann"}, "client", "ann"),
        ({"user": "ann"}, "tenant", ""),
        ({"user": "ann", "cache_salt": "x"}, "client", "ann"),
        ({"cache_salt": "x"}, "client", "x"),
        ({"user": "a" * 1024}, "client", "a" * 1024),
        ({"specprefill": True}, "spec_prefill", True),
        ({"specprefill": False, "specprefill_keep_pct": None}, "spec_prefill", False),
        ({"specprefill_keep_pct": 0.1}, "spec_prefill_keep", 0.1),
        ({"specprefill_keep_pct": 1}, "spec_prefill_keep", 1),
        ({"specprefill": True, "specprefill_keep_pct": 0.5}, "spec_prefill_keep", 0.5),
        ({"cache_salt": "salt 🙂é " * 16}, "tenant", "salt 🙂é " * 16),
        ({"response_format": {"type": "json_object"}}, "grammar", GrammarSpec("json_object", "", "response_format")),
        (
            {"structured_outputs": {"regex": "[0-9]+ é"}, "response_format": {"type": "text"}},
            "grammar",
            GrammarSpec("regex", "[0-9]+ é", "structured_outputs.regex"),
        ),
        (
            {"structured_outputs": {"json": {"b": 1, "a": 2}}},
            "grammar",
            GrammarSpec("json_schema", '{"b": 1, "a": 2}', "structured_outputs.json"),
        ),
        (
            {"response_format": schema_format(schema={})},
            "grammar",
            GrammarSpec("json_schema", "{}", SCHEMA_FIELD),
        ),
    ],
)
def test_wire_value_becomes_the_canonical_value(chat, backend, fields, name, value):
    assert chat(**fields).status_code == 200
    assert getattr(backend.requests[0][0], name) == value


def test_n_becomes_the_number_of_choices(chat, backend):
    chat(n=128)
    assert backend.requests[0][0].num_choices == 128


@pytest.mark.parametrize("strict", [True, False, None])
def test_schema_arrives_unchanged_whether_strict_or_not(chat, backend, strict):
    assert chat(response_format=schema_format(strict=strict, description="a thing")).status_code == 200
    grammar = backend.requests[0][0].grammar
    assert grammar == GrammarSpec("json_schema", json.dumps(SCHEMA, ensure_ascii=False), SCHEMA_FIELD)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    "form",
    [
        schema_format(),
        schema_format(name="calendar event"),
        schema_format(name="Response[Item]"),
        {"type": "json_schema", "json_schema": without(schema_format()["json_schema"], "name")},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA, "strict": True, "name": "é"},
        {"type": "json_object", "schema": SCHEMA},
    ],
)
def test_a_schema_is_enforced_wherever_clients_put_it(chat, backend, form):
    assert chat(response_format=form).status_code == 200
    assert json.loads(backend.requests[0][0].grammar.text) == SCHEMA


def test_a_verbosity_is_accepted_and_named_as_ignored(chat):
    response = chat(verbosity="low")
    assert (response.status_code, response.headers["x-orchard-ignored"]) == (200, "verbosity")


def least(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}


@given(schema=st.dictionaries(st.text(), json_values, max_size=6))
def test_schema_keeps_its_values_and_the_order_of_its_keys(schema: dict[str, Any]):
    for fields in ({"response_format": schema_format(schema=schema)}, {"structured_outputs": {"json": schema}}):
        grammar = request_fields(parse_chat_completion(least(**fields))[0])["grammar"]
        assert json.dumps(json.loads(grammar.text)) == json.dumps(schema)


@given(bias=st.dictionaries(st.text(max_size=3) | st.integers().map(str), json_values, max_size=3))
def test_logit_bias_is_either_honoured_exactly_or_refused(bias: dict[str, Any]):
    try:
        honoured = request_fields(parse_chat_completion(least(logit_bias=bias))[0])["logit_bias"]
    except InvalidRequest as error:
        assert error.field is not None and error.field.startswith("logit_bias")
    else:
        assert {str(token_id): value for token_id, value in honoured} == bias


@pytest.mark.parametrize("stream", [False, True])
def test_schema_refused_by_the_engine_is_a_400_that_names_its_field(chat, backend, stream):
    backend.start_script = [InvalidRequest("the schema is no schema: ...", SCHEMA_FIELD)]
    response = chat(response_format=schema_format(), stream=stream)
    assert (response.status_code, response.json()["error"]["param"]) == (400, SCHEMA_FIELD)


PART = {"type": "text", "text": "a"}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "field", "limit"),
    [
        ({"role": "user", "content": [PART] * (MAX_PARTS + 1)}, "messages[0].content", MAX_PARTS),
        ({"role": "assistant", "tool_calls": [CALL] * (MAX_TOOL_CALLS + 1)}, "messages[0].tool_calls", MAX_TOOL_CALLS),
    ],
)
def test_parts_and_tool_calls_of_a_message_are_limited(message, field, limit):
    parse_chat_completion(
        {"model": "m", "messages": [{k: v[:limit] if k != "role" else v for k, v in message.items()}]}
    )
    with pytest.raises(InvalidRequest, match=str(limit)) as caught:
        parse_chat_completion({"model": "m", "messages": [message]})
    assert caught.value.field == field


def test_a_body_of_many_unknown_fields_is_refused():
    raw = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **{f"f{i}": 0 for i in range(100_000)}}
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_completion(raw)
    assert "100000 unknown fields, such as `f0`; the limit is 64" in caught.value.message


def test_unknown_fields_are_reported_or_refused_as_configured():
    raw = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "keep_alive": 5, "ttl": None}
    assert parse_chat_completion(raw)[1] == ("keep_alive", "ttl")
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_completion(raw, "refuse")
    assert caught.value.field == "keep_alive"


def test_validation_of_a_list_stops_at_its_first_error():
    with pytest.raises(ValidationError) as caught:
        ChatCompletionBody.model_validate(
            {
                "model": "m",
                "messages": [{"role": "user", "content": [1] * 1000}] * 2,
                "stop": [1] * 10,
                "stop_token_ids": ["a"] * 9,
            }
        )
    assert caught.value.error_count() == 3


def test_schema_above_the_maximum_size_is_refused():
    text = "x" * MAX_GRAMMAR_CHARS
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": text}}}
    body, _ = parse_chat_completion(
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "response_format": form}
    )
    with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_CHARS)) as caught:
        request_fields(body)
    assert caught.value.field == "response_format.json_schema.schema"
