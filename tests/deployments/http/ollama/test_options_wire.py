"""Options: each is honoured, ignored by name, or refused."""

from typing import Any

import pytest

from deployments.http.ollama.options_wire import WITHOUT_EFFECT
from deployments.http.parsed_request import ReadingRules
from engine.errors import InvalidRequest
from tests.deployments.http.ollama.conftest import asked, parsed_chat, parsed_prompt


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {"max_tokens": None, "temperature": None, "top_k": None, "seed": None, "stop": ()}),
        ({"num_predict": 5}, {"max_tokens": 5}),
        ({"num_predict": 5.0}, {"max_tokens": 5}),
        ({"num_predict": -1}, {"max_tokens": None}),
        ({"num_predict": -2}, {"max_tokens": None}),
        ({"temperature": 0, "top_p": 0.5, "min_p": 0.1}, {"temperature": 0, "top_p": 0.5, "min_p": 0.1}),
        ({"top_k": 40}, {"top_k": 40}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": 7}, {"seed": 7}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": -2}, {"seed": 2**64 - 2}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None}, {"stop": ()}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}),
        (
            {"repeat_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 1, "repeat_last_n": 0},
            {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        ),
        (
            {"presence_penalty": -1.5, "frequency_penalty": 0.5},
            {"presence_penalty": -1.5, "frequency_penalty": 0.5, "repetition_penalty": None},
        ),
        ({"typical_p": 1.0}, {}),
    ],
)
def test_an_option_is_honoured(options: dict[str, Any], fields: dict[str, Any]):
    for parsed in (parsed_chat(options=options), parsed_prompt(options=options)):
        assert {name: getattr(parsed.request, name) for name in fields} == fields
        assert parsed.ignored == ()


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_an_option_of_the_start_has_no_effect_and_is_named(name: str):
    plain = asked()
    for rules in (
        ReadingRules("org/demo", frozenset()),
        ReadingRules("org/demo", frozenset(), unknown_fields="refuse"),
    ):
        parsed = parsed_chat(rules, options={name: 8192})
        assert parsed.ignored == (f"options.{name}",) and parsed.request == plain


def test_a_window_of_the_penalties_is_named():
    parsed = parsed_chat(options={"repeat_penalty": 1.2, "repeat_last_n": 64})
    assert (parsed.request.repetition_penalty, parsed.ignored) == (1.2, ("options.repeat_last_n",))


def test_an_unknown_option_is_named_or_refused():
    assert parsed_chat(options={"foo": 1}).ignored == ("options.foo",)
    with pytest.raises(InvalidRequest, match=r"`options\.foo` is not supported"):
        parsed_chat(ReadingRules("org/demo", frozenset(), unknown_fields="refuse"), options={"foo": 1})


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"temperature": -0.1}, "options.temperature", "-0.1"),
        ({"temperature": 101}, "options.temperature", "100"),
        ({"temperature": "1"}, "options.temperature", "must be a number"),
        ({"top_k": -2}, "options.top_k", "-2"),
        ({"top_k": 1.5}, "options.top_k", "1.5"),
        ({"top_p": 1.1}, "options.top_p", "1.1"),
        ({"min_p": 2}, "options.min_p", "2"),
        ({"seed": 2**63}, "options.seed", str(2**63)),
        ({"seed": True}, "options.seed", "true"),
        ({"num_predict": 0}, "options.num_predict", "at least 1"),
        ({"num_predict": -3}, "options.num_predict", "-3"),
        ({"num_predict": 2**31}, "options.num_predict", str(2**31)),
        ({"repeat_penalty": 0}, "options.repeat_penalty", "0.01"),
        ({"repeat_last_n": -2}, "options.repeat_last_n", "-2"),
        ({"presence_penalty": 3}, "options.presence_penalty", "3"),
        ({"frequency_penalty": -3}, "options.frequency_penalty", "-3"),
        ({"stop": "a"}, "options.stop", "must be an array"),
        ({"stop": [""]}, "options.stop[0]", "at least 1"),
        ({"stop": ["a"] * 17}, "options.stop", "16"),
        ({"stop": ["a" * 257]}, "options.stop[0]", "256"),
        ({"typical_p": 0.7}, "options.typical_p", "0.7"),
        ([], "options", "must be an object"),
        ("{}", "options", "must be an object"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(options: Any, field: str, says: str):
    with pytest.raises(InvalidRequest) as caught:
        parsed_chat(options=options)
    assert caught.value.field == field and f"`{field}`" in caught.value.message and says in caught.value.message
