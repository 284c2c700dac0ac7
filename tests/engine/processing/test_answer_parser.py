"""Answers of the demo model's format: content, thought and calls, however the tokens are distributed over pushes."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.processing.answer_parser import AnswerDelta, AnswerParser, AnswerRules
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.tool_arguments import ParsedToolCall
from tests.engine.processing.walks import encode

TOKENIZER = ChatTokenizer(DEMO_MODEL)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
WEATHER = tool("get_weather", city=STRING, days=INTEGER)
TOOLS = AnswerRules(tools=(WEATHER,))
THINKS = AnswerRules(is_thinking=True)
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def call(name: str, **parameters: str) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


PARIS = call("get_weather", city="Paris")
PARIS_CALL = ParsedToolCall("get_weather", '{"city": "Paris"}')


def parse_ids(ids: list[int], rules: AnswerRules, cuts: list[int]) -> tuple[AnswerDelta, AnswerParser]:
    """The sum of all deltas."""
    parser = TOKENIZER.answer_parser(rules)
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [parser.push(ids[a:b]) for a, b in pairwise(borders)] + [parser.finish()]
    calls = tuple(call for delta in deltas for call in delta.tool_calls)
    assert parser.has_tool_calls == bool(calls)
    total = AnswerDelta(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        calls,
        sum(delta.num_reasoning_tokens for delta in deltas),
    )
    return total, parser


def parse(text: str, rules: AnswerRules = TOOLS) -> AnswerDelta:
    ids = list(encode(text))
    total, _ = parse_ids(ids, rules, list(range(len(ids))))
    return total


def test_an_answer_without_markup_is_content_verbatim():
    text = "\n Sure: a < b,\n\n<b>bold</b>  \n"

    for rules in (AnswerRules(), TOOLS):
        assert parse(text, rules) == AnswerDelta(text)


def test_a_call_is_reported_when_it_is_complete_and_its_markup_never():
    answer = parse("Let me see.\n" + PARIS + "\n" + call("get_weather", city="Oslo", days="3"))

    oslo = ParsedToolCall("get_weather", '{"city": "Oslo", "days": 3}')
    assert answer == AnswerDelta("Let me see.", "", (PARIS_CALL, oslo))


def test_text_behind_a_call_stays_apart_from_the_text_in_front_of_it():
    assert parse("One.\n" + PARIS + "\n\nTwo.").content == "One.\n\nTwo."
    assert parse(PARIS + "\nTwo.").content == "Two."


def test_a_call_that_is_cut_off_is_dropped():
    for num_chars in range(len("<tool_call>"), len(PARIS)):
        assert parse("Hm.\n" + PARIS[:num_chars]).tool_calls == ()
    assert parse("Hm.\n" + PARIS[:-12]) == AnswerDelta("Hm.")


def test_calls_are_text_where_no_tools_are_declared():
    assert parse(PARIS, AnswerRules()).content == PARIS


def test_an_unknown_function_is_reported_as_it_is_written():
    assert parse(call("nobody", x="1")).tool_calls == (ParsedToolCall("nobody", '{"x": "1"}'),)


@pytest.mark.parametrize("text", ["<think>", "a</think>b", '{"c": "<think>"}', "<tool_call>", "ab<think>"])
@pytest.mark.parametrize("is_thinking", [False, True])
@given(cuts=st.lists(st.integers(0, 40)))
def test_control_strings_in_a_constrained_answer_are_content(text: str, is_thinking: bool, cuts: list[int]):
    spelled = [id_ for char in text for id_ in encode(char)]
    thought = list(encode("Why?\n</think>\n\n")) if is_thinking else []
    total, _ = parse_ids([*thought, *spelled], AnswerRules(is_thinking=is_thinking, is_constrained=True), cuts)
    assert (total.content, total.reasoning) == (text, "Why?" if is_thinking else "")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call></tool_call>",
        "<tool_call>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "</tool_call></parameter>",
        "<tool_call><tool_call></tool_call>",
    ],
)
def test_markup_that_is_no_call_is_no_content(text: str):
    answer = parse(text)
    assert answer.tool_calls == () and "tool_call" not in answer.content


def test_a_function_without_the_outer_markup_of_a_call_is_content():
    assert parse("Use <function=f> here").content == "Use <function=f> here"


@pytest.mark.parametrize(
    "value", ["a</tool_call>b", "a</parameter>b", "<tool_call>", "a\n\n</function>\nb", "  two\n\nlines \n", ""]
)
def test_an_argument_value_may_contain_the_markup(value: str):
    [one] = parse(call("get_weather", city=value, days="1")).tool_calls
    assert json.loads(one.arguments) == {"city": value, "days": 1}


def test_reasoning_is_separated_from_the_content():
    expected = AnswerDelta("Yes.", "Is it?\n\nIt is.", (), 12)

    opened = parse("Is it?\n\nIt is.\n</think>\n\nYes.", THINKS)
    own = parse("<think>\nIs it?\n\nIt is.\n</think>\n\nYes.", AnswerRules())
    again = parse("<think>\nIs it?\n\nIt is.\n</think>\n\nYes.", THINKS)

    assert [answer[:2] for answer in (opened, own, again)] == [expected[:2]] * 3
    assert own.num_reasoning_tokens == len(encode("<think>\nIs it?\n\nIt is.\n</think>"))
    assert opened.num_reasoning_tokens == len(encode("Is it?\n\nIt is.\n</think>"))


def test_a_thought_that_is_cut_off_is_all_reasoning():
    ids = encode("Well, it")
    assert parse("Well, it", THINKS) == AnswerDelta("", "Well, it", (), len(ids))
    assert parse("Well, it\n</thi", THINKS).content == ""


def test_an_empty_thought_gives_no_reasoning():
    assert parse("\n\n</think>\n\nYes.", THINKS)[:2] == ("Yes.", "")
    assert parse("</think>\n\nYes.", AnswerRules()).content == "Yes."


def test_a_second_thought_is_a_further_paragraph_of_the_reasoning():
    assert parse("a\n</think>\n\nX\n<think>\nb\n</think>\n\nY", THINKS)[:2] == ("X\nY", "a\n\nb")


def test_calls_come_behind_the_thought():
    rules = AnswerRules(tools=(WEATHER,), is_thinking=True)
    assert parse("Paris?\n</think>\n\n" + PARIS, rules)[:3] == ("", "Paris?", (PARIS_CALL,))
    assert parse("Hm <tool_call> hm\n</think>\n\nNo.", rules)[:3] == ("No.", "Hm <tool_call> hm", ())


@pytest.mark.parametrize("enable_thinking", [True, False])
@pytest.mark.parametrize("with_call", [True, False])
def test_an_answer_rendered_as_history_has_the_tokens_that_were_generated(enable_thinking: bool, with_call: bool):
    kwargs = {"tools": [WEATHER], "enable_thinking": enable_thinking}
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    prompt = TOKENIZER.encode_chat(question, template_kwargs=kwargs).tolist()
    thought = "I need the weather.\n</think>\n\n" if enable_thinking else ""
    generated = list(encode(thought + "Let me see." + ("\n" + PARIS if with_call else "")))
    answer, _ = parse_ids(generated, AnswerRules(tools=(WEATHER,), is_thinking=enable_thinking), [])
    calls = [
        {"id": "c", "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in answer.tool_calls
    ]
    turn = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning, "tool_calls": calls}

    again = TOKENIZER.encode_chat([*question, turn], template_kwargs=kwargs).tolist()

    assert again[: len(prompt) + len(generated)] == prompt + generated


def test_a_stop_string_applies_to_the_content_only():
    rules = AnswerRules(stop=("STOP", "Paris"), tools=(WEATHER,), is_thinking=True)
    ids = list(encode("STOP Paris\n</think>\n\nOK " + PARIS + " then STOP here"))
    answer, parser = parse_ids(ids, rules, list(range(len(ids))))

    assert answer.content.startswith("OK") and answer.content.endswith(" then ")
    assert answer.reasoning == "STOP Paris" and answer.tool_calls == (PARIS_CALL,)
    assert parser.stopped and parser.stop_sequence == "STOP"
    assert TOKENIZER.token_bytes(ids[parser.num_tokens - 1])[-1:] in b"STOP"
    assert parser.num_tokens == next(
        n for n in range(len(ids)) if b"".join(map(TOKENIZER.token_bytes, ids[:n])).endswith(b"then STOP")
    )


@pytest.mark.parametrize(
    ("stop", "text", "content", "found"),
    [
        (("d", "cd"), "abcde", "ab", "cd"),  # complete with the same character: the longer one
        (("de", "bc"), "abcde", "a", "bc"),
        (("e", "abcd"), "abcde", "", "abcd"),
    ],
)
@pytest.mark.parametrize("at_once", [False, True], ids=["by token", "at once"])
def test_first_complete_stop_string_ends_the_answer(
    stop: tuple[str, ...], text: str, content: str, found: str, at_once: bool
):
    ids = list(encode(text))
    answer, parser = parse_ids(ids, AnswerRules(stop=stop), [] if at_once else list(range(len(ids))))
    assert (answer.content, parser.stop_sequence) == (content, found)


def test_space_in_front_of_a_possible_call_completes_a_stop_string_at_once():
    ids = list(encode("one\n\ntwo"))
    answer, parser = parse_ids(ids, AnswerRules(stop=("\n\n",), tools=(WEATHER,)), list(range(len(ids))))
    assert answer.content == "one" and parser.num_tokens < len(ids)


words = ["a", " b", "<", "</", "tool_call", ">", "think", "\n", "\n\n", "STOP", "ST", "🙂", "é", "</parameter>"]
pieces = st.sampled_from(
    [*words, *MARKUP, PARIS, call("get_weather", city="12", days="3"), "<function=f>", "<parameter=x>\n", "</function>"]
)


@settings(deadline=None, max_examples=300)
@given(
    texts=st.lists(pieces, max_size=14),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    has_tools=st.booleans(),
    is_thinking=st.booleans(),
    stop=st.sampled_from([(), ("STOP",), ("\n\n", "b<")]),
)
def test_parsed_answer_does_not_depend_on_how_its_tokens_are_split(
    texts: list[str], cuts: list[int], has_tools: bool, is_thinking: bool, stop: tuple[str, ...]
):
    rules = AnswerRules(stop, (WEATHER,) if has_tools else (), is_thinking)
    ids = list(encode("".join(texts)))

    whole, parser = parse_ids(ids, rules, list(range(len(ids))))
    split, other = parse_ids(ids, rules, cuts)

    assert split == whole and other.num_tokens == parser.num_tokens and other.stop_sequence == parser.stop_sequence
    for one in whole.tool_calls:
        assert isinstance(json.loads(one.arguments), dict)
    if not any(marker in "".join(texts) for marker in MARKUP):  # around markup that is left out the text is not one
        assert not any(s in whole.content for s in stop)


@settings(deadline=None, max_examples=200)
@given(
    content=st.text(alphabet="ab <>\n", max_size=20),
    thought=st.text(alphabet="ab <>\n", max_size=20),
    cities=st.lists(st.text(alphabet='ab <>"\n\\{}é', max_size=12), max_size=3),
    cut=st.integers(0, 1000),
)
def test_content_contains_no_markup_wherever_the_answer_is_cut_off(
    content: str, thought: str, cities: list[str], cut: int
):
    text = f"{thought}\n</think>\n\n{content}" + "".join("\n" + call("get_weather", city=city) for city in cities)
    ids = list(encode(text))
    rules = AnswerRules(tools=(WEATHER,), is_thinking=True)

    whole, _ = parse_ids(ids, rules, [])
    part, _ = parse_ids(ids[: cut % (len(ids) + 1)], rules, [3, 7])

    assert whole.reasoning == thought.strip()
    assert whole.content == (content.strip() if cities else content.lstrip())
    assert [json.loads(one.arguments)["city"] for one in whole.tool_calls] == cities
    assert part.tool_calls == whole.tool_calls[: len(part.tool_calls)]
    assert whole.content.startswith(part.content.rstrip()) and whole.reasoning.startswith(
        part.reasoning.rstrip("</thi\n")
    )


def test_a_long_run_of_white_space_is_delivered():
    parser = TOKENIZER.answer_parser(TOOLS)
    out = parser.push(encode("x" + "\n" * 500)).content
    assert len(out) > 400
    assert out + parser.finish().content == "x" + "\n" * 500
