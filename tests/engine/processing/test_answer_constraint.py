"""Tools, their choice, a format and thinking make one grammar and one thought, with the demo model's template."""

import json
from copy import deepcopy
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.processing.answer_constraint import answer_constraint
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import GrammarSpec, ThoughtSpec
from tests.engine.processing.test_tool_grammar import NOW, PARIS, TOOLS, call
from tests.engine.processing.walks import accepts, compiled

TOKENIZER = ChatTokenizer(DEMO_MODEL)
SCHEMA = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
OBJECT = GrammarSpec("json_object")


def constraint(**changes: Any) -> tuple[GrammarSpec | None, ThoughtSpec | None]:
    given: dict[str, Any] = {"tools": TOOLS, "choice_mode": "auto", "choice_names": (), "parallel": True}
    given |= {"grammar": None, "is_thinking": False, "budget": None}
    return answer_constraint(TOKENIZER, **(given | changes))


def allows(text: str, **changes: Any) -> bool:
    grammar, _ = constraint(**changes)
    assert grammar is not None
    return accepts(compiled(grammar), text)


def test_a_format_without_tools_is_the_grammar():
    assert constraint(tools=[]) == (None, None)
    assert constraint(tools=[], grammar=SCHEMA) == (SCHEMA, None)


def test_tool_choice_none_forbids_calls_and_allows_text_or_the_format():
    assert allows("Plain <b>text</b>.\n", choice_mode="none")
    assert not allows(PARIS, choice_mode="none") and not allows("Hm\n" + PARIS, choice_mode="none")
    assert constraint(choice_mode="none", grammar=SCHEMA)[0] == SCHEMA


def test_tool_names_of_the_choice_forbid_calls_of_other_tools():
    for mode in ("auto", "required"):
        assert allows(call("now"), choice_mode=mode, choice_names=("now", "search-all"))
        assert allows(call("search-all"), choice_mode=mode, choice_names=("now", "search-all"))
        assert not allows(PARIS, choice_mode=mode, choice_names=("now", "search-all"))


def test_a_named_tool_is_called_alone():
    assert allows(call("now"), choice_mode="required", choice_names=("now",), parallel=False)
    assert not allows(call("now") + "\n" + call("now"), choice_mode="required", choice_names=("now",), parallel=False)
    assert not allows("Hello", choice_mode="required", choice_names=("now",))


@pytest.mark.parametrize("grammar", [SCHEMA, OBJECT])
def test_an_answer_with_tools_and_a_format_is_calls_or_the_format(grammar: GrammarSpec):
    assert allows('{"a": 1}', grammar=grammar) and allows(PARIS, grammar=grammar)
    assert not allows("Hello", grammar=grammar) and not allows("", grammar=grammar)
    assert allows('{"a": "x"}', grammar=grammar) == (grammar is OBJECT)


def test_a_required_call_replaces_the_format():
    assert allows(PARIS, choice_mode="required", grammar=SCHEMA)
    assert not allows('{"a": 1}', choice_mode="required", grammar=SCHEMA)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"choice_names": ("nobody",), "choice_mode": "required"}, "tool_choice"),
        ({"tools": [], "choice_mode": "required"}, "tool_choice"),
        ({"grammar": GrammarSpec("regex", "a+", "guided_regex")}, "guided_regex"),
        ({"grammar": GrammarSpec("json_schema", '{"not": {}}')}, "response_format"),
    ],
)
def test_impossible_constraints_are_refused_with_the_name_of_their_field(changes: dict[str, Any], field: str):
    with pytest.raises(InvalidRequest) as refusal:
        constraint(**changes)
    assert refusal.value.field == field


def test_equal_tools_give_equal_grammars():
    again, other = constraint(tools=deepcopy(TOOLS)), constraint(tools=[NOW])
    assert again == constraint() and other != again


def test_a_thought_gets_a_matcher_only_with_a_grammar_tools_or_a_budget():
    closing = tuple(TOKENIZER.encode_text("\n</think>\n\n").tolist())
    watched = ThoughtSpec(9, closing)

    assert constraint(tools=[], is_thinking=True) == (None, None)
    assert constraint(tools=[], is_thinking=True, budget=7) == (None, ThoughtSpec(9, closing, 7))
    assert constraint(tools=[], is_thinking=True, grammar=SCHEMA) == (SCHEMA, watched)
    assert constraint(is_thinking=True)[1] == watched
    assert constraint(is_thinking=False, budget=7)[1] is None
