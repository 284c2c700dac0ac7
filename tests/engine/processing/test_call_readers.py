"""Calls that a grammar enforces are returned while they are generated: joined they are what the whole text says."""

import json
import random
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.processing.answer_parser import AnswerDelta, AnswerParser, AnswerRules
from engine.processing.argument_writer import ArgumentWriter
from engine.processing.call_reader import CallReader
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.json_arguments import JsonArguments
from engine.processing.shaped_call import CallShape, ShapedCall
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.tool_arguments import ParsedToolCall, ToolTypes, dump_json
from engine.processing.xml_call import XmlCall, parse_xml
from tests.engine.processing.call_parts import joined
from tests.engine.processing.test_tool_grammar import PLAIN, call, matcher_for
from tests.engine.processing.walks import walk

TOKENIZER = ChatTokenizer(DEMO_MODEL)


def types_of(**properties: Any) -> ToolTypes:
    parameters = {"type": "object", "properties": properties}
    return ToolTypes([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


STRING = {"type": "string"}
NULLABLE = {"type": ["string", "null"]}
TYPES = types_of(
    s=STRING,
    a={"type": ["array", "null"], "items": STRING},
    n={"type": "integer"},
    o=NULLABLE,
    e={"enum": ["1", "x"]},
    m={"anyOf": [STRING, {"type": "number"}]},
)


def read(reader: CallReader, text: str, cuts: list[int]) -> list[ParsedToolCall]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return joined([part for a, b in pairwise(borders) for part in reader.push(text[a:b])])


def rewritten(text: str, cuts: list[int], types: ToolTypes = TYPES) -> str:
    writer = ArgumentWriter("f", types, {"string"})
    arguments, written = JsonArguments(writer), ""
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for a, b in pairwise(borders):
        assert b < len(text) or text.endswith("}")
        rest = arguments.push(text[a:b])
        written += writer.take()
        assert rest == ("" if a < b == len(text) else None) or a == b
    return written


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
cut_lists = st.lists(st.integers(0, 2000), max_size=12)


@settings(deadline=None, max_examples=100)
@given(
    members=st.dictionaries(st.text(), values, max_size=5),
    is_ascii=st.booleans(),
    indent=st.sampled_from([None, 0, 3, "\t"]),
    cuts=cut_lists,
)
def test_json_arguments_are_rewritten_as_they_would_be_as_a_whole(
    members: dict[str, Any], is_ascii: bool, indent: Any, cuts: list[int]
):
    text = json.dumps(members, ensure_ascii=is_ascii, indent=indent)

    assert rewritten(text, cuts) == TYPES.call("f", members).arguments
    assert rewritten(text, list(range(len(text)))) == rewritten(text, cuts)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (' {"s" :"\\u00e9\\/\\n\\ud83d\\ude00" } ', '{"s": "é/\\n😀"}'),
        ('{"s": "\\ud83dx\\ude00\\ud83d"}', '{"s": "\\ud83dx\\ude00\\ud83d"}'),
        ('{"n": "5", "e": "1", "m": "1.5", "o": "null"}', '{"n": 5, "e": "1", "m": 1.5, "o": null}'),
        ('{"n": 1.0e2, "m": -0.0, "x": 1e999}', f'{{"n": 100.0, "m": -0.0, "x": {sys.float_info.max}}}'),
        ('{"x": [-1e999, ' + "9" * 5000 + "]}", f'{{"x": [{-sys.float_info.max}, {sys.float_info.max}]}}'),
        ('{"s": "a", "s": "b"}', '{"s": "a", "s": "b"}'),
        ("{ }", "{}"),
        ('{"x": {"s": [ ], "y" : { }}}', '{"x": {"s": [], "y": {}}}'),
    ],
)
def test_odd_json_is_written_in_one_form(text: str, arguments: str):
    for cuts in ([], list(range(len(text)))):
        writer = ArgumentWriter("f", TYPES, {"string"})
        reader, borders = JsonArguments(writer), [0, *cuts, len(text)]
        rests = [reader.push(text[a:b]) for a, b in pairwise(borders)]
        assert writer.take() == arguments
        assert next(rest for rest in rests if rest is not None).strip() == ""


def test_text_that_is_no_json_is_an_error():
    for text in ('{"s": "\\x"}', '{"s": "\\u12g4"}', '{"x": nil}', '{"x": 1.2.3}'):
        with pytest.raises(ValueError, match=r"could not convert|no escape"):
            JsonArguments(ArgumentWriter("f", TYPES, {"string"})).push(text)


SHAPE = CallShape('[TOOL_CALLS][{"name": "', '", "arguments": ', '}, {"name": "', "}]")


@settings(deadline=None, max_examples=100)
@given(members=st.lists(st.dictionaries(st.text(), values, max_size=3), min_size=1, max_size=3), cuts=cut_lists)
def test_calls_between_markup_are_read_one_after_the_other(members: list[dict[str, Any]], cuts: list[int]):
    body = SHAPE.joint.join(f"f{SHAPE.middle}{json.dumps(each)}" for each in members)  # type: ignore[union-attr]
    text = f'[{{"name": "{body}{SHAPE.end}'

    calls = read(ShapedCall(SHAPE, "[TOOL_CALLS]", TYPES), text, cuts)

    assert calls == [TYPES.call("f", each) for each in members]


def test_a_call_of_an_undeclared_tool_is_left_to_the_parser_of_whole_calls():
    for text in ('[{"name": "g", "arguments": {}}]', "[{'name'", "[{}"):
        reader = ShapedCall(SHAPE, "[TOOL_CALLS]", TYPES)
        with pytest.raises(ValueError, match="no call of a declared tool"):
            reader.push(text)
        assert not reader.has_begun


xml_text = st.text(alphabet='ab <>/"\\\né', max_size=30) | st.sampled_from(
    [
        "</parameter>",
        "x\n</parameter>",
        "</parameter>\n</par",
        "<parameter=s>\n1\n",
        "</functio",
        "\n",
        "\n\n",
        "</",
        "null",
    ]
)


@settings(deadline=None, max_examples=300)
@given(
    members=st.dictionaries(st.sampled_from(["s", "n", "o", "e", "m", "other"]), xml_text | st.just("12"), max_size=4),
    cuts=cut_lists,
)
def test_xml_calls_are_read_as_they_are_parsed_as_a_whole(members: dict[str, str], cuts: list[int]):
    body = call("f", *members.items()).removeprefix("<tool_call>").removesuffix("</tool_call>")
    [whole] = parse_xml(body, TYPES)

    assert read(XmlCall(TYPES), body, cuts) == [whole]
    assert read(XmlCall(TYPES), body, list(range(len(body)))) == [whole]


def test_a_text_is_returned_at_once_and_other_values_when_they_are_certain():
    reader = XmlCall(TYPES)

    def push(text: str) -> str:
        return "".join(part.arguments for part in reader.push(text))

    assert [part.name for part in reader.push("\n<function=f>")] == ["f"]
    assert push("\n<parameter=s>\n") == '{"s": '
    assert push("def") == '"def' and push(" f(") == " f("
    assert push("):\n") == "):" and push("</par") == "" and push("ty>") == "\\n</party>"
    assert push("\n</parameter>\n") == "" and push("<parameter=o>\n") == '", "o": '
    assert push("nul") == "" and push("ls") == '"nulls'
    assert push("\n</parameter>\n<parameter=n>\n1") == '", "n": ' and push("2") == ""
    assert push("\n</parameter>\n<parameter=m>\n1.") == '12, "m": ' and push("5e") == "" and push("x") == '"1.5ex'
    assert push("\n</parameter>\n</function>\n") == '"}'


def test_an_array_is_returned_while_it_is_generated_and_may_hold_the_markup():
    reader = XmlCall(TYPES)
    written = []
    pieces = ("<function=f><parameter=a>\n", "\n[ ", '"one","</para', 'meter></function>"', " ]", "\n</parameter>\n")
    for piece in (*pieces, "<parameter=a>\nnu", "ll\n</parameter></function>"):
        written.append("".join(part.arguments for part in reader.push(piece)))
    assert written == ['{"a": ', "[", '"one", "</para', 'meter></function>"', "]", "", ', "a": ', "null}"]


def test_json_texts_are_returned_up_to_the_last_escape():
    writer = ArgumentWriter("f", TYPES, {"string"})
    reader = JsonArguments(writer)
    written = []
    for piece in ('{"s"', ': "ab', "c\\", "n", "\\u00", "e9", '", "o": "n', "ull", 'able", "n": 1', "2", "}"):
        reader.push(piece)
        written.append(writer.take())
    assert written == ['{"s": ', '"ab', "c", "\\n", "", "é", '", "o": ', "", '"nullable", "n": ', "", "12}"]


def parts_of(
    parser: AnswerParser, token_ids: list[int], borders: list[int]
) -> tuple[AnswerDelta, list[ParsedToolCall]]:
    deltas = [parser.push(token_ids[a:b]) for a, b in pairwise(borders)] + [parser.finish()]
    content = "".join(delta.content for delta in deltas)
    return AnswerDelta(content), joined([part for delta in deltas for part in delta.tool_calls])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), choice=st.sampled_from(["auto", "required", "t", "u"]))
def test_whatever_the_masks_allow_is_read_as_it_is_parsed_as_a_whole(seed: int, choice: str):
    token_ids = walk(matcher_for(choice, True, PLAIN), seed, max_tokens=300, ending="\n</parameter>\n")
    if token_ids is None:
        return
    ids, rng = list(token_ids), random.Random(seed)
    cuts = sorted(rng.sample(range(len(ids) + 1), min(4, len(ids))))

    def parser(enforces_calls: bool) -> AnswerParser:
        return TOKENIZER.answer_parser(AnswerRules(tools=tuple(PLAIN), enforces_calls=enforces_calls))

    plain, calls = parts_of(parser(False), ids, [0, len(ids)])
    each, streamed = parts_of(parser(True), ids, list(range(len(ids) + 1)))
    few, again = parts_of(parser(True), ids, [0, *cuts, len(ids)])
    end = rng.randrange(len(ids) + 1)
    _, part = parts_of(parser(True), ids[:end], [0, end])

    assert streamed == again and each == few == plain
    assert [(one.name, json.loads(one.arguments)) for one in streamed] == [
        (one.name, json.loads(one.arguments)) for one in calls
    ]
    for one, other in zip(part, streamed, strict=False):
        assert other.arguments.startswith(one.arguments) and one.is_last <= other.is_last


def test_a_call_that_the_end_of_the_answer_cuts_off_stays_as_far_as_it_was_returned():
    rules = AnswerRules(tools=(PLAIN[2],), enforces_calls=True)
    text = call("u", ("l", '["a"]'), ("s", "one two"))
    ids = TOKENIZER.encode_text(text.partition("wo")[0]).tolist()
    parser = TOKENIZER.answer_parser(rules)

    _, [part] = parts_of(parser, ids, list(range(len(ids) + 1)))

    assert part == ParsedToolCall("u", '{"l": ["a"], "s": "one t', is_last=False) and not parser.has_tool_calls


def test_dump_json_is_the_form_of_every_value():
    for value in ({"a": [1, 2.5, "é\n", None, True, {}]}, {}):
        assert rewritten(json.dumps(value), [3, 9]) == dump_json(value)
