"""How model families write calls and thoughts, found by their templates."""

import asyncio
import json
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import GrammarConfig
from engine.processing.answer_constraint import answer_constraint
from engine.processing.answer_parser import AnswerDelta, AnswerRules
from engine.processing.grammar import GrammarCompiler
from engine.processing.library_parser import library_parser
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import GrammarSpec, InvalidRequest
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
        tuple(call for delta in deltas for call in delta.tool_calls),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_of_each_family_is_understood(tokenizers: Any, name: str):
    family, (tokenizer, _) = FAMILIES[name], tokenizers[name]

    answer = parse(tokenizer, family.answer)

    assert answer.content == family.content
    assert [(call.name, call.arguments) for call in answer.tool_calls] == list(family.calls)
    assert answer.reasoning == ("I think" if "I think" in family.answer else "")


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
