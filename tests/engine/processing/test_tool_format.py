"""How model families write calls and thoughts, found by their templates."""

import asyncio
import json
import random
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import GrammarConfig
from engine.errors import InvalidRequest
from engine.processing.answer_constraint import answer_constraint
from engine.processing.answer_parser import AnswerDelta, AnswerRules
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.control_tokens import without_added_tokens
from engine.processing.grammar import GrammarCompiler
from engine.processing.library_parser import library_parser
from engine.processing.thought_matcher import ThoughtMatcher, ThoughtRules
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.tool_arguments import ToolTypes
from engine.processing.tool_format import FUNCTION_GEMMA, LONGCAT, MINIMAX, PYTHONIC, ToolFormat
from engine.protocol import GrammarSpec
from tests.engine.processing.call_parts import joined
from tests.engine.processing.tool_templates import FAMILIES

F = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"s": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["s", "n"],
        },
    },
}
G = {"type": "function", "function": {"name": "g"}}
WITH_GRAMMAR = ("hermes", "mistral list", "mistral args", "deepseek", "llama")
WITHOUT_GRAMMAR = ("glm", "kimi", "gemma 4", "harmony")
FORMATS = (*WITH_GRAMMAR, *WITHOUT_GRAMMAR)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ChatTokenizer, Path]]:
    made = {}
    for name, family in FAMILIES.items():
        out = tmp_path_factory.mktemp("family") / "model"
        made[name] = family.tokenizer(out), out
    return made


def parse(tokenizer: ChatTokenizer, text: str, cuts: list[int] | None = None, **rules: Any) -> AnswerDelta:
    parser = tokenizer.answer_parser(AnswerRules(**{"tools": (F, G), **rules}))
    ids = tokenizer.encode_text(text).tolist()
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)] if cuts is not None else range(len(ids) + 1)
    deltas = [parser.push(ids[a:b]) for a, b in pairwise(borders)] + [parser.finish()]
    return AnswerDelta(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(joined(call for delta in deltas for call in delta.tool_calls)),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_each_family_is_understood(tokenizers: Any, name: str):
    family, (tokenizer, _) = FAMILIES[name], tokenizers[name]

    answer = parse(tokenizer, family.answer)

    assert answer.content == family.content
    assert [(call.name, call.arguments) for call in answer.tool_calls] == list(family.calls)
    assert answer.reasoning == ("I think" if "I think" in family.answer else "")
    assert parse(tokenizer, family.answer, enforces_calls=True) == answer


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_text_of_each_family_is_content(tokenizers: Any, name: str):
    tokenizer, _ = tokenizers[name]
    text = 'Plain: [1, 2] {"a": 1}\n\nand <b>more</b>. '
    lead = "</think>" if name == "deepseek" else ""
    assert parse(tokenizer, lead + text).content == text


@settings(deadline=None, max_examples=60)
@given(cuts=st.lists(st.integers(0, 200), max_size=5), num_chars=st.integers(0, 400))
@pytest.mark.parametrize("name", FORMATS)
def test_parser_yields_whole_calls_and_no_markup_for_any_split_and_end(
    tokenizers: Any, name: str, cuts: list[int], num_chars: int
):
    family, (tokenizer, _) = FAMILIES[name], tokenizers[name]
    text = family.answer[:num_chars]

    answer = parse(tokenizer, text, cuts)

    assert answer == parse(tokenizer, text)
    streamed = parse(tokenizer, text, cuts, enforces_calls=True)
    assert streamed == parse(tokenizer, text, enforces_calls=True)
    complete = [(call.name, call.arguments) for call in streamed.tool_calls if call.is_last]
    assert complete == list(family.calls)[: len(complete)] and len(complete) >= len(answer.tool_calls)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == list(family.calls)[: len(answer.tool_calls)]
    if num_chars >= len(family.answer):
        assert len(answer.tool_calls) == len(family.calls)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_parser_never_fails_on_arbitrary_text(tokenizers: Any, name: str, data: st.DataObject):
    tokenizer, _ = tokenizers[name]
    markers = [*tokenizer.tool_format.markers, *(tokenizer.reasoning.markers if tokenizer.reasoning else ())]
    pieces = [*markers, *"{}[]\"'\\", "f", "name", ":", ",", " ", "\n", "arguments", FAMILIES[name].answer]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=14)))

    answer = parse(tokenizer, text)

    assert answer == parse(tokenizer, text, data.draw(st.lists(st.integers(0, 99), max_size=4)))
    for call in answer.tool_calls:
        assert call.name and isinstance(json.loads(call.arguments), dict)


def test_json_that_is_no_call_is_content_where_calls_begin_like_json(tokenizers: Any):
    tokenizer, _ = tokenizers["llama"]

    assert parse(tokenizer, '{"answer": 4}').content == '{"answer": 4}'
    assert parse(tokenizer, '{"name": "Bob"}').content == '{"name": "Bob"}'
    assert parse(tokenizer, '<|python_tag|>{"name": "g", "parameters": {}}').tool_calls[0].name == "g"
    parser = tokenizer.answer_parser(AnswerRules(tools=(F,)))
    assert parser.push(tokenizer.encode_text('{"answer": ')).content == '{"answer":'


def test_json_arguments_may_contain_the_markup(tokenizers: Any):
    tokenizer, _ = tokenizers["hermes"]
    arguments = json.dumps({"s": "a</tool_call>{", "n": 1})
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert [call.arguments for call in parse(tokenizer, text).tool_calls] == [arguments]


def test_a_call_that_is_no_json_is_shown_as_text(tokenizers: Any):
    tokenizer, _ = tokenizers["hermes"]
    answer = parse(tokenizer, "<tool_call>\nget weather\n</tool_call>")
    assert answer.content.strip() == "get weather" and not answer.tool_calls


def test_thinking_templates_are_detected_by_their_rendering(tokenizers: Any):
    reasoning = {name: tokenizer.reasoning for name, (tokenizer, _) in tokenizers.items()}

    assert {name for name, found in reasoning.items() if found} == {
        *("deepseek", "glm", "gemma 4", "harmony", "magistral")
    }
    assert reasoning["deepseek"].always and not reasoning["deepseek"].opening_ids
    assert reasoning["glm"].switch == "enable_thinking" and reasoning["glm"].opening_ids
    assert reasoning["harmony"].takes_effort and reasoning["harmony"].always
    assert reasoning["magistral"].history_key == "reasoning_content"


def test_thoughts_of_each_family_are_parsed_as_reasoning(tokenizers: Any):
    for name, start, end in (
        ("glm", "<think>", "</think>\n"),
        ("gemma 4", "<|channel>thought\n", "<channel|>"),
        ("magistral", "[THINK]", "[/THINK]"),
    ):
        tokenizer, _ = tokenizers[name]
        answer = parse(tokenizer, f"{start}Hm.{end}Yes.", is_thinking=True)
        assert answer[:2] == ("Yes.", "Hm."), name
        spec = tokenizer.reasoning
        assert tokenizer.encode_text(end).tolist() == list(spec.closing_ids), name


def test_arguments_come_as_text_where_the_template_wants_text(tokenizers: Any):
    tokenizer, _ = tokenizers["deepseek"]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"s":"é"}'}}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    ids = tokenizer.encode_chat(turns, template_kwargs={})
    text = b"".join(map(tokenizer.token_bytes, ids.tolist())).decode()
    assert '```json\n{"s":"é"}\n```' in text


@cache
def compiler(out: Path) -> GrammarCompiler:
    tokenizer = ChatTokenizer(out)
    return GrammarCompiler(out, len(tokenizer._tokenizer.get_vocab()), (2,), GrammarConfig())


def accepts(tokenizer: ChatTokenizer, out: Path, grammar: GrammarSpec, text: str) -> bool:
    matcher = asyncio.run(compiler(out).compile(grammar))
    ids = tuple(tokenizer.encode_text(text).tolist())
    masks = matcher.masks(ids)
    return len(masks) == len(ids) + 1 and bool(int(masks[-1][0]) >> 2 & 1)


def constraint(tokenizer: ChatTokenizer, **changes: Any) -> GrammarSpec | None:
    given: dict[str, Any] = {"tools": [F, G], "choice_mode": "auto", "choice_names": (), "parallel": True}
    given |= {"grammar": None, "is_thinking": False, "budget": None}
    return answer_constraint(tokenizer, **(given | changes))[0]


@pytest.mark.parametrize("name", WITH_GRAMMAR)
def test_grammars_of_json_calls_accept_the_calls_that_the_template_writes(tokenizers: Any, name: str):
    family, (tokenizer, out) = FAMILIES[name], tokenizers[name]
    answer = family.answer.rpartition("</think>\n\n")[2]
    calls = answer.removeprefix(family.content).lstrip("\n")
    required = constraint(tokenizer, choice_mode="required")

    assert required is not None and accepts(tokenizer, out, required, calls)
    assert not accepts(tokenizer, out, required, "Hello") and not accepts(tokenizer, out, required, "")
    assert not accepts(tokenizer, out, required, calls.replace("3", '"x"'))
    assert not accepts(tokenizer, out, required, calls.replace("f", "h", 1)) or "function" in calls[:60]
    if len(family.calls) > 1:
        single = constraint(tokenizer, choice_mode="required", parallel=False)
        named = constraint(tokenizer, choice_mode="required", choice_names=("f",))
        assert single is not None and not accepts(tokenizer, out, single, calls)
        assert named is not None and not accepts(tokenizer, out, named, calls)


@pytest.mark.parametrize("name", ["hermes", "mistral args", "deepseek"])
def test_auto_allows_text_and_json_calls_and_none_allows_text_only(tokenizers: Any, name: str):
    family, (tokenizer, out) = FAMILIES[name], tokenizers[name]
    answer = family.answer.rpartition("</think>\n\n")[2]
    auto, none = constraint(tokenizer), constraint(tokenizer, choice_mode="none")
    schema = GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    either = constraint(tokenizer, grammar=schema)

    assert auto is not None and none is not None and either is not None
    assert accepts(tokenizer, out, auto, answer) and accepts(tokenizer, out, auto, "Hello [1] {}")
    assert accepts(tokenizer, out, none, "Hello [1] {}") and not accepts(tokenizer, out, none, answer)
    assert accepts(tokenizer, out, either, '{"a": 1}') and not accepts(tokenizer, out, either, "Hello")
    assert accepts(tokenizer, out, either, answer.removeprefix(family.content).lstrip("\n"))
    assert not accepts(tokenizer, out, either, '{"a": "x"}')


@pytest.mark.parametrize("name", WITHOUT_GRAMMAR)
def test_fields_that_need_a_grammar_are_refused_for_families_without_one(tokenizers: Any, name: str):
    tokenizer, _ = tokenizers[name]

    assert constraint(tokenizer) is None
    for changes, field in (
        ({"choice_mode": "required"}, "tool_choice"),
        ({"choice_mode": "required", "choice_names": ("f",)}, "tool_choice"),
        ({"choice_names": ("f",)}, "tool_choice"),
        ({"parallel": False}, "parallel_tool_calls"),
        ({"grammar": GrammarSpec("json_object")}, "response_format"),
        ({"tools": [{"type": "function", "function": {**F["function"], "strict": True}}]}, "tools[0].function.strict"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            constraint(tokenizer, **changes)
        assert refusal.value.field == field
    assert constraint(tokenizer, choice_mode="none") is not None


def test_tool_choice_none_is_refused_where_calls_begin_like_text(tokenizers: Any):
    with pytest.raises(InvalidRequest, match="cannot be forbidden"):
        constraint(tokenizers["llama"][0], choice_mode="none")


def test_tools_are_refused_where_the_template_takes_none(tokenizers: Any):
    assert tokenizers["magistral"][0].tool_format is None
    with pytest.raises(InvalidRequest, match="does not support tools"):
        constraint(tokenizers["magistral"][0])


def test_the_librarys_parsers_are_used_without_mlx():
    """Every process that parses answers would otherwise hold MLX."""
    code = (
        "import sys; from engine.processing.library_parser import library_parser as p\n"
        "assert p('gemma4')('call:f{n:3}', None) == {'name': 'f', 'arguments': {'n': 3}}\n"
        "import engine.processing.tokenizer\n"
        "assert not {'mlx', 'mlx.core', 'mlx_lm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_library_version_is_the_one_whose_parsers_were_reviewed():
    """Another version: read these modules again, and whether the next test still fails."""
    assert version("mlx-lm") == "0.32.2"
    for name in ("gemma4", "function_gemma", "minimax_m2", "pythonic"):
        assert callable(library_parser(name))


def test_the_librarys_own_parser_of_the_xml_format_loses_types():
    """Which is why there is one here; see parse_xml."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}}]
    text = "<function=f>\n<parameter=s>\nnull\n</parameter>\n</function>"
    assert library_parser("qwen3_coder")(text, tools)["arguments"] == {"s": None}


@pytest.mark.parametrize(
    ("module", "text", "arguments"),
    [
        ("gemma4", 'call:f{s:<|"|>a{b}<|"|>,o:{k:[1,true]}}', {"s": "a{b}", "o": {"k": [1, True]}}),
        ("function_gemma", "call:f{s:<escape>12<escape>,n:3}", {"s": "12", "n": 3}),
        (
            "minimax_m2",
            '<invoke name="f"><parameter name="s">12</parameter><parameter name="n">3</parameter></invoke>',
            {"s": "12", "n": 3},
        ),
        ("pythonic", "[f(s='12', n=3)]", {"s": "12", "n": 3}),
    ],
)
def test_the_librarys_parsers_return_the_name_and_arguments_of_a_call(
    module: str, text: str, arguments: dict[str, Any]
):
    found = library_parser(module)(text, [F])
    [found] = found if isinstance(found, list) else [found]
    assert (found["name"], found["arguments"]) == ("f", arguments)


MARKUP = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|im_end|>",
        "</parameter>",
        "</function>",
        "[TOOL_CALLS]",
    ),
    *(
        "[/TOOL_CALLS]",
        "[ARGS]",
        "[THINK]",
        "<|eot_id|>",
        "<|python_tag|>",
        "<｜tool▁call▁end｜>",
        "<|call|>",
        "<|end|>",
    ),
    *("```", "null", '{"name": "f"}', "a</tool_call>b", "</parameter>\n", "<|im_end|><|im_end|>", " </think>"),
)
"""Values that spell the markup of calls, thoughts and turns of one family or another."""


def forced(tokenizer: ChatTokenizer, out: Path, grammar: GrammarSpec) -> tuple[int, ...]:
    """Return a random answer that the grammar allows."""
    matcher = asyncio.run(compiler(out).compile(grammar))
    rng, token_ids = random.Random(1), []
    while len(token_ids) < 500:
        bits = np.unpackbits(matcher.masks()[0].view(np.uint8), bitorder="little")
        choices = np.flatnonzero(bits).tolist()
        if 2 in choices:
            return tuple(token_ids)
        token_ids.append(rng.choice(choices))
        matcher.advance((token_ids[-1],))
    raise AssertionError("the answer does not end")


@pytest.mark.parametrize("value", MARKUP)
@pytest.mark.parametrize("name", ["demo", *WITH_GRAMMAR])
def test_a_forced_value_that_spells_markup_is_made_of_ordinary_tokens(tokenizers: Any, name: str, value: str):
    tokenizer, out = (ChatTokenizer(DEMO_MODEL), DEMO_MODEL) if name == "demo" else tokenizers[name]
    inner = {"type": "object", "properties": {"k": {"const": value}}, "required": ["k"], "additionalProperties": False}
    parameters = {"type": "object", "properties": {"s": {"enum": [value]}, "o": inner}, "required": ["s", "o"]}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {**parameters, "additionalProperties": False}}}
    ]
    grammar = constraint(tokenizer, tools=tools, choice_mode="required", parallel=False)
    assert grammar is not None and not grammar.left_open

    token_ids = forced(tokenizer, out, grammar)
    reasoning = tokenizer.reasoning
    thought = reasoning.closing_ids if reasoning is not None and reasoning.always else ()
    for enforces in (False, True):
        parser = tokenizer.answer_parser(AnswerRules(tools=tuple(tools), is_constrained=True, enforces_calls=enforces))
        deltas = [*(parser.push([token_id]) for token_id in (*thought, *token_ids)), parser.finish()]
        [call] = joined(call for delta in deltas for call in delta.tool_calls)
        assert json.loads(call.arguments) == {"s": value, "o": {"k": value}}
        assert not "".join(delta.content for delta in deltas).strip()
    shape = None if tokenizer.tool_format is None else tokenizer.tool_format.shape
    markup = "<tool_call></tool_call>" if shape is None else shape.begin + shape.middle + shape.end
    for text, token_id in tokenizer.control_ids.items():
        assert token_ids.count(token_id) == markup.count(text), text


ENDS = {
    "hermes": "</tool_call>",
    "deepseek": "<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_end|>",
    "glm": "</tool_call>",
    "gemma 4": "<tool_call|>",
    "harmony": "<|call|>",
    "mistral args": "[TOOL_CALLS]",
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("form", ["{}", "a{}b", "{}{}"])
def test_a_value_that_spells_the_end_of_a_call_is_a_part_of_the_call(tokenizers: Any, name: str, form: str):
    family, (tokenizer, _) = FAMILIES[name], tokenizers[name]
    value = form.replace("{}", ENDS[name])

    answer = parse(tokenizer, family.answer.replace("12", value))

    assert answer.content == family.content
    assert json.loads(answer.tool_calls[0].arguments) == {"s": value, "n": 3}
    assert len(answer.tool_calls) == len(family.calls)


@pytest.mark.parametrize(
    ("format", "text", "end"),
    [
        (FUNCTION_GEMMA, "call:f{s:<escape>%s<escape>,n:3}", "<end_function_call>"),
        (MINIMAX, '<invoke name="f"><parameter name="s">%s</parameter><parameter name="n">3</parameter></invoke>', ""),
        (PYTHONIC, "[f(s='%s', n=3)]", "<|tool_call_end|>"),
        (LONGCAT, "f\n" + "<longcat_arg_key>%s</longcat_arg_key>\n<longcat_arg_value>%s</longcat_arg_value>\n", ""),
    ],
)
def test_bodies_of_other_formats_end_outside_of_values(format: ToolFormat, text: str, end: str):
    end = end or format.noise[0]
    text = text.replace("%s", "s", 1).replace("%s", f"x{end}y") if text.count("%s") > 1 else text % f"x{end}y"
    body = format.body(format.openings[0])

    assert body.push(text) is None and body.push(end + "behind") == "behind"
    [call] = format.parse(body.text, ToolTypes([F]))
    assert json.loads(call.arguments)["s"] == f"x{end}y"


@pytest.mark.parametrize("cuts", [None, [1, 2, 30], [9, 12, 13, 14]])
@pytest.mark.parametrize(
    ("name", "thought"),
    [
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("glm", "<think>Hm.</think>\n"),
        ("gemma 4", "<|channel>thought\nHm.<channel|>"),
        ("magistral", "[THINK]Hm.[/THINK]"),
    ],
)
def test_a_constrained_answer_behind_a_thought_that_the_model_opens_may_spell_its_markers(
    tokenizers: Any, name: str, thought: str, cuts: list[int] | None
):
    tokenizer, _ = tokenizers[name]
    assert tokenizer.reasoning.opening_ids
    plain = without_added_tokens(tokenizer._tokenizer)
    for marker in tokenizer.reasoning.markers:
        for value in (marker, f"a{marker}b", f"{marker}\n{marker}", f'"{marker}"'):
            spelled = plain.encode("\n" + value, add_special_tokens=False).ids[1:]
            parser = tokenizer.answer_parser(AnswerRules(is_thinking=True, is_constrained=True))
            ids = [*tokenizer.encode_text(thought).tolist(), *spelled]
            borders = [0, *(cuts or range(1, len(ids))), len(ids)]
            deltas = [parser.push(ids[a:b]) for a, b in pairwise(sorted(borders))] + [parser.finish()]

            assert "".join(delta.content for delta in deltas) == value
            assert "".join(delta.reasoning for delta in deltas) == "Hm."


def test_harmony_always_thinks_and_opens_its_thought_itself(tokenizers: Any):
    """Without a thought that the template opens, a budget counts from the opening tokens."""
    tokenizer, out = tokenizers["harmony"]
    reasoning = tokenizer.reasoning
    assert reasoning.always and reasoning.opening_ids == tuple(tokenizer.encode_text(reasoning.start).tolist())
    given: dict[str, Any] = {"tools": (), "choice_mode": "auto", "choice_names": (), "parallel": True}
    _, spec = answer_constraint(
        tokenizer, **given, grammar=GrammarSpec("regex", "<\\|end\\|>"), is_thinking=True, budget=3
    )
    assert spec is not None and spec.opening_ids == reasoning.opening_ids

    vocab_size = len(tokenizer._tokenizer.get_vocab())
    grammar = asyncio.run(compiler(out).compile(GrammarSpec("regex", "<\\|end\\|>")))
    matcher = ThoughtMatcher(ThoughtRules(spec, (2,), vocab_size, has_grammar=True), grammar)
    rng, token_ids = random.Random(3), []
    while not token_ids or token_ids[-1] != 2:
        bits = np.unpackbits(matcher.masks()[0].view(np.uint8), bitorder="little")[:vocab_size]
        free = [one for one in np.flatnonzero(bits).tolist() if one not in tokenizer.control_ids.values()]
        token_ids.append(rng.choice(free or np.flatnonzero(bits).tolist()))
        matcher.advance((token_ids[-1],))

    num_opening = len(reasoning.opening_ids)
    assert tuple(token_ids[:num_opening]) == reasoning.opening_ids
    assert tuple(token_ids[num_opening + 3 :][: len(reasoning.closing_ids)]) == reasoning.closing_ids
    parser = tokenizer.answer_parser(AnswerRules(is_thinking=True, is_constrained=True))
    assert "".join(delta.content for delta in (parser.push(token_ids[:-1]), parser.finish())) == "<|end|>"
