"""The fields of chat and generate besides messages and options."""

import json
from typing import Any

import pytest

from deployments.http.errors import ModelNotFound
from deployments.http.parsed_request import ReadingRules
from deployments.requests import Thinking
from engine.errors import InvalidRequest
from engine.protocol import GrammarSpec
from tests.deployments.http.ollama.conftest import HI, asked, parsed_chat, parsed_prompt


@pytest.mark.parametrize("parse", [parsed_chat, parsed_prompt])
@pytest.mark.parametrize(
    ("fields", "streams"), [({}, True), ({"stream": None}, True), ({"stream": True}, True), ({"stream": False}, False)]
)
def test_an_answer_is_streamed_unless_the_client_refuses_it(parse: Any, fields: dict[str, Any], streams: bool):
    assert parse(**fields).stream is streams


@pytest.mark.parametrize(
    ("think", "thinking"),
    [
        (None, Thinking("auto", field="think")),
        (True, Thinking("on", field="think")),
        (False, Thinking("off", field="think")),
        ("low", Thinking("on", 1024, "low", "think")),
        ("medium", Thinking("on", 8192, "medium", "think")),
        ("max", Thinking("on", None, "high", "think")),
    ],
)
def test_think_is_a_switch_or_a_level_and_on_where_a_template_can(think: Any, thinking: Thinking):
    assert asked(think=think).thinking == thinking
    assert parsed_prompt(think=think).request.thinking == thinking


def test_format_is_json_or_a_schema():
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
    assert asked(format=schema).grammar == GrammarSpec("json_schema", json.dumps(schema), "format")
    assert asked(format="json").grammar == GrammarSpec("json_object", field="format")
    assert asked(format="").grammar is asked(format=None).grammar is None


def test_logprobs():
    assert [asked(**fields).logprobs for fields in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3})] == [
        None,
        0,
        3,
    ]


@pytest.mark.parametrize("name", ["org/demo", "org/demo:latest", "gpt-5", "gpt-5:latest"])
def test_the_model_has_all_its_names_with_and_without_latest(name: str):
    assert parsed_chat(model=name).echo.model == parsed_prompt(model=name).echo.model == name


@pytest.mark.parametrize("name", ["demo", "org/demo:7b", "org/demo:latest:latest", "ORG/demo"])
def test_another_model_is_not_found(name: str):
    with pytest.raises(ModelNotFound):
        parsed_chat(model=name)


def test_a_name_that_has_the_tag_is_found_as_it_is():
    assert parsed_chat(ReadingRules("qwen:latest", frozenset()), model="qwen:latest").echo.model == "qwen:latest"


def test_a_request_without_a_prompt_only_loads():
    for parsed in (
        parsed_chat(messages=[]),
        parsed_chat(messages=None),
        parsed_prompt(prompt=""),
        parsed_prompt(prompt=None, keep_alive=0),
    ):
        assert parsed.echo.is_load and not parsed.stream


def test_a_prompt_is_a_message_of_the_user_behind_the_system_prompt():
    request = parsed_prompt(system="Be brief.").request
    assert list(request.messages) == [{"role": "system", "content": "Be brief."}, HI]
    assert list(parsed_prompt(system="").request.messages) == [HI]


def test_a_raw_prompt_is_the_prompt_itself():
    request = parsed_prompt(raw=True, options={"num_predict": 3}, format="json").request
    assert (request.raw_prompt, request.messages, request.max_tokens, request.thinking) == ("Hi", (), 3, None)
    assert request.grammar is not None
    others: list[dict[str, Any]] = [{"system": "S"}, {"images": ["iVBO"]}, {"think": True}]
    for fields in others:
        with pytest.raises(InvalidRequest, match="raw"):
            parsed_prompt(raw=True, **fields)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"width": 512}, "width"),
        ({"steps": 4}, "steps"),
        ({"prompt": ["Hi"]}, "prompt"),
        ({"system": 1}, "system"),
        ({"raw": "yes"}, "raw"),
        ({"images": ["a"] * 2049}, "images"),
    ],
)
def test_what_generate_cannot_honour_is_refused_by_name(fields: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest) as caught:
        parsed_prompt(**fields)
    assert caught.value.field == field and f"`{field}`" in caught.value.message


def test_empty_fields_of_generate_ask_for_nothing():
    assert parsed_prompt(suffix="", template="", context=[]).ignored == ()


@pytest.mark.parametrize("parse", [parsed_chat, parsed_prompt])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stream": "yes"}, "stream"),
        ({"format": "yaml"}, "format"),
        ({"format": ["json"]}, "format"),
        ({"think": "hard"}, "think"),
        ({"think": 1}, "think"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"_debug_render_only": True}, "_debug_render_only"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"keep_alive": "x" * 20_000}, "keep_alive"),
    ],
)
def test_a_wrong_field_is_refused_by_name(parse: Any, fields: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.field == field and f"`{field}`" in caught.value.message


def test_what_would_cut_a_conversation_is_named():
    assert parsed_chat(truncate=True, shift=True).ignored == ("truncate", "shift")
    assert parsed_chat(truncate=False, shift=False, keep_alive="5m").ignored == ()
