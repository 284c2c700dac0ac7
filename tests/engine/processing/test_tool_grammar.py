"""Tool calls of the demo model's format: right ones pass, wrong ones stop at the first wrong token."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tool_parsers.qwen3_coder import parse_tool_call

from engine.core.row import Matcher
from engine.errors import InvalidRequest
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.tool_grammar import tool_call_grammar
from tests.engine.processing.test_json_schema import is_valid
from tests.engine.processing.walks import IM_END, accepted_part, accepts, allowed, compiled, decode, encode, walk


def tool(name: str, properties: dict[str, Any] | None = None, **parameters: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": "d"}
    if "strict" in parameters:
        function["strict"] = parameters.pop("strict")
    if properties is not None:
        function["parameters"] = {"type": "object", "properties": properties, **parameters}
    return {"type": "function", "function": function}


WEATHER = tool(
    "get_weather",
    {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    required=["city"],
)
SEARCH = tool(
    "search-all",
    {
        "text": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "filter": {"$ref": "#/$defs/filter"},
        "colour": {"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]},
        "again": {"$ref": "#/properties/filter"},
    },
    **{
        "$defs": {
            "colour": {"type": "string", "enum": ["red", "dark red"]},
            "filter": {
                "type": "object",
                "properties": {"tags": {"type": "array", "items": {"$ref": "#/$defs/colour"}}},
                "required": ["tags"],
                "additionalProperties": False,
            },
        }
    },
)
NOW = tool("now")
TOOLS = [WEATHER, SEARCH, NOW]


def call(name: str, *parameters: tuple[str, str]) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def matcher_for(choice: str = "required", parallel: bool = True, tools: list[dict[str, Any]] = TOOLS) -> Matcher:
    return compiled(tool_call_grammar(tools, choice, parallel))


def parsed(text: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bodies = [part.partition("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
    return [parse_tool_call(body.strip("\n"), tools) for body in bodies]


PARIS = call("get_weather", ("city", "Paris"))

RIGHT = [
    PARIS,
    call("get_weather", ("city", "")),
    call("get_weather", ("city", 'São "Paulo"\n\n  <b>{}</b> </para')),
    call("get_weather", ("city", "null and void"), ("days", "9"), ("unit", "F")),
    call("now"),
    call("search-all"),
    call("search-all", ("text", "a\nb"), ("filter", '{"tags": ["red", "dark red"]}')),
    call("search-all", ("colour", "dark red"), ("again", '{\n  "tags": []\n}')),
    call("search-all", ("colour", "null")),
]

OPEN = "<tool_call>\n<function="
OPEN_DAYS = OPEN + "get_weather>\n<parameter=city>\nx\n</parameter>\n<parameter=days>\n"
WRONG = [  # what is written, and what of it comes before its first wrong token
    ("Sure! " + PARIS, ""),
    (" " + PARIS, ""),
    ("<tool_call>" + PARIS, "<tool_call>"),
    (call("get_time"), OPEN + "get_"),
    (call("get_weather"), OPEN + "get_weather>\n"),
    (call("get_weather", ("days", "1")), OPEN + "get_weather>\n<parameter="),
    (call("get_weather", ("city", "x"), ("days", "12")), OPEN_DAYS + "1"),
    (call("get_weather", ("city", "x"), ("days", "0")), OPEN_DAYS),
    (call("get_weather", ("city", "x"), ("days", '"1"')), OPEN_DAYS),
    (call("search-all", ("colour", "blue")), OPEN + "search-all>\n<parameter=colour>\n"),
    (call("search-all", ("filter", "[]")), OPEN + "search-all>\n<parameter=filter>\n"),
    (call("search-all", ("filter", '{"tags": [1]}')), OPEN + 'search-all>\n<parameter=filter>\n{"tags": ['),
    (call("now") + "\nDone.", call("now") + "\n"),
    (call("now") + call("now"), call("now")),
]


@pytest.mark.parametrize("text", RIGHT)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_valid_calls_are_accepted(text: str, choice: str) -> None:
    assert accepts(matcher_for(choice), text)


@pytest.mark.parametrize(("text", "right"), WRONG)
def test_wrong_calls_stop_at_the_first_wrong_token(text: str, right: str) -> None:
    assert accepted_part(matcher_for(), text) == right


def test_the_models_own_template_writes_right_calls() -> None:
    arguments = {"city": "Köln", "days": 3, "unit": "C"}
    calls = [{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}] * 2
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    prompt = ChatTokenizer(DEMO_MODEL).encode_chat(messages, template_kwargs={"tools": TOOLS})
    text = decode(tuple(prompt.tolist()))
    answer = text[text.rindex("</think>\n\n<tool_call>") + len("</think>\n\n") :].partition("<|im_end|>")[0]

    assert accepts(matcher_for(), answer)
    assert parsed(answer, TOOLS) == [{"name": "get_weather", "arguments": arguments}] * 2


def test_the_markup_is_made_of_the_control_tokens_alone() -> None:
    spelled = (*encode("<tool"), *encode("_call>"))
    assert decode(spelled) == "<tool_call>" and encode("<tool_call>")[0] not in spelled

    for choice in ("auto", "required"):
        assert len(matcher_for(choice).masks(spelled)) <= len(spelled)


def test_auto_allows_any_text_until_a_call_and_no_text_after_it() -> None:
    matcher = matcher_for("auto")

    assert accepts(matcher, "")
    assert accepts(matcher, "No tool: <function=now> a < b\n")
    assert accepts(matcher, "Let me see.\n" + PARIS + "\n" + call("now"))
    assert accepted_part(matcher, "Hm\n" + call("nobody")) == "Hm\n<tool_call>\n<function=n"
    matcher.advance(encode(PARIS))
    assert {decode((token_id,)) for token_id in allowed(matcher.masks()[0])} == {"\n", "<|im_end|>", "<|endoftext|>"}


def test_a_second_call_is_not_allowed_when_calls_may_not_be_parallel() -> None:
    two = PARIS + "\n" + call("now")

    for choice in ("auto", "required"):
        assert accepts(matcher_for(choice, parallel=True), two)
        assert accepts(matcher_for(choice, parallel=False), PARIS)
        assert accepted_part(matcher_for(choice, parallel=False), two) == PARIS


def test_tool_choice_with_a_name_allows_no_other_function() -> None:
    matcher = matcher_for("now", parallel=False)

    assert accepts(matcher, call("now"))
    assert not accepts(matcher, PARIS)
    assert not accepts(matcher, "")


def test_a_string_argument_cannot_contain_its_closing_markup_or_be_null() -> None:
    matcher = matcher_for()

    for text in ("a</parameter>b", "a</tool_call>", "null", "NULL"):
        part = accepted_part(matcher, call("get_weather", ("city", text), ("unit", "C")))
        assert "<parameter=unit>" not in part


def test_a_string_does_not_spell_the_control_tokens_either() -> None:
    begun = encode(OPEN + "get_weather>\n<parameter=city>\n")

    for start, end in (("a<tool", "_call>"), ("a</tool", "_call>")):
        spelled = (*begun, *encode(start), *encode(end))
        assert decode(spelled).endswith(start + end)
        assert len(matcher_for().masks(spelled)) <= len(spelled)
        assert len(matcher_for().masks(spelled[:-1])) == len(spelled)


def test_extra_parameters_are_allowed_only_if_the_schema_allows_them() -> None:
    free = [tool("free", {"a": {"type": "string"}}, additionalProperties={"type": "integer"})]

    assert accepts(matcher_for(tools=free), call("free", ("a", "x"), ("other", "3")))
    assert accepts(matcher_for(tools=free), call("free", ("other", "3")))
    assert not accepts(matcher_for(tools=free), call("free", ("other", "x")))
    assert not accepts(matcher_for(tools=free), call("free", ("other", "3"), ("a", "4")))
    assert not accepts(matcher_for(), call("now", ("other", "3")))


def test_a_schema_without_strict_is_enforced_as_far_as_possible() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "format": "x"}
    loose = [tool("loose", {"a": schema, "b": {"type": "string", "pattern": "^x"}}, minProperties=1)]

    assert accepts(matcher_for(tools=loose), call("loose", ("a", "[1, 1]"), ("b", "y")))
    assert not accepts(matcher_for(tools=loose), call("loose", ("a", '["x"]')))


def test_an_overlapping_one_of_is_refused_with_strict() -> None:
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number"}]}

    assert accepts(matcher_for(tools=[tool("f", {"a": overlapping})]), call("f", ("a", "1")))
    with pytest.raises(InvalidRequest, match="oneOf"):
        matcher_for(tools=[tool("f", {"a": overlapping}, strict=True)])


@pytest.mark.parametrize(
    "schema", [{"anyOf": 3}, {"allOf": {}}, {"enum": 1}, {"oneOf": "x"}, {"type": 4}, {"enum": []}]
)
def test_a_malformed_schema_is_never_more_than_refused(schema: dict[str, Any]) -> None:
    for strict in (True, False):
        try:
            matcher_for(tools=[tool("f", {"a": schema}, strict=strict, required=["a"])])
        except InvalidRequest as error:
            assert error.message


A_CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/city", "$defs": {"city": A_CITY}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/city"}, "city": A_CITY}},
        {"type": "object", "$ref": "#/definitions/city", "definitions": {"city": A_CITY}},
        {**A_CITY, "type": ["object", "null"]},
        {**A_CITY, "additionalProperties": None, "$defs": None, "description": None},
        {**A_CITY, "required": ["city", "undeclared"]},
    ],
)
def test_an_unusual_schema_at_the_top_is_enforced(parameters: dict[str, Any]) -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    matcher = matcher_for(tools=[function])
    assert accepts(matcher, call("f", ("city", "Oslo")))
    assert not accepts(matcher, call("f", ("city", "Rome"))) and not accepts(matcher, call("f"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string", "pattern": "^(?!x)a$"}},
        {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["z"], "additionalProperties": False},
        {"type": "object", "properties": None, "required": None, "items": None},
        {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}},
        {"type": "object", "properties": {"k": {}}, "patternProperties": {"^k$": {"type": "null"}, "(?<!a)b": {}}},
    ],
)
def test_what_cannot_be_enforced_is_left_open_where_not_strict(schema: dict[str, Any]) -> None:
    value = '["a"]' if schema["type"] == "array" else "{}"
    assert accepts(matcher_for(tools=[tool("f", {"v": schema}, required=["v"])]), call("f", ("v", value)))


def test_a_parameter_may_have_spaces_in_its_name() -> None:
    assert accepts(
        matcher_for(tools=[tool("f", {"Account Number": {"type": "integer"}})]), call("f", ("Account Number", "5"))
    )


PARAMETERS = "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("bad", "field", "reason"),
    [
        (tool("f", {"a": {"type": "array", "uniqueItems": True}}, strict=True), PARAMETERS, "`uniqueItems` at $.prop"),
        (tool("f", {"a": {"type": "string", "pattern": "x"}}, strict=True), PARAMETERS, "`pattern` in the parameter"),
        (tool("f", {}, strict=True, minProperties=1), PARAMETERS, "`minProperties` at $"),
        (tool("f", {}, strict=True, required=["x"]), PARAMETERS, "`required` names 'x'"),
        (tool("f", {}, strict=True, required=[{}]), PARAMETERS, "`required` at $"),
        (tool("f", {"a": {"enum": ["x\n</parameter>\n</function>"]}}, strict=True), PARAMETERS, "be a value of 'a'"),
        (tool("f", {"a<b": {}}, strict=True), PARAMETERS, "'a<b' is not a valid name"),
        (tool("f", {"a ": {}}, strict=True), PARAMETERS, "'a ' is not a valid name"),
        (tool("f", {"": {}}, strict=True), PARAMETERS, "'' is not a valid name"),
        (tool("f g"), "tools[1].function.name", "'f g' is not a valid name"),
        (tool("f", {}, strict=True, **{"$ref": "#/$defs/a"}), PARAMETERS, "`$ref` is '#/$defs/a', which does not lead"),
        (tool("f", {}, strict=True, type="array"), PARAMETERS, "`type` is 'array'"),
        (tool("f", ["a"], strict=True), PARAMETERS, "`properties` is ['a']; expected an object"),  # type: ignore[arg-type]
    ],
)
def test_a_tool_that_cannot_be_enforced_is_refused_by_name(bad: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        tool_call_grammar([NOW, bad], "auto", True)

    assert refusal.value.field == field
    assert refusal.value.message.startswith(f"`{field}`: ") and reason in refusal.value.message


def test_a_tool_choice_that_names_no_tool_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'later'; no tool has this name"):
        tool_call_grammar(TOOLS, "later", True)


def test_names_are_data_and_never_grammar() -> None:
    odd = [tool('x"|/.*/', {'k\\"': {"type": "string"}, "é%json": {"enum": ['"\n\\', 1]}})]
    matcher = matcher_for(tools=odd)

    assert accepts(matcher, call('x"|/.*/', ('k\\"', "v"), ("é%json", '"\n\\')))
    assert not accepts(matcher, call("y"))


def test_a_hundred_tools_compile_and_run() -> None:
    many = [tool(f"tool_{i}", {f"p{j}": {"type": ["integer", "null"]} for j in range(8)}) for i in range(100)]

    assert accepts(matcher_for(tools=many), call("tool_99", ("p1", "1"), ("p7", "null")))


PLAIN = [
    WEATHER,
    tool(
        "t",
        {"n": {"type": "number", "minimum": -9, "maximum": 99}, "b": {"type": "boolean"}, "o": {"type": "object"}},
        required=["b", "n"],
    ),
    tool("u", {"l": {"type": "array", "items": {"type": "string", "maxLength": 3}}, "s": {"type": "string"}}),
]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), parallel=st.booleans(), choice=st.sampled_from(["auto", "required", "t", "u"]))
def test_tool_calls_allowed_by_the_masks_parse_and_satisfy_the_schema(seed: int, parallel: bool, choice: str) -> None:
    token_ids = walk(matcher_for(choice, parallel, PLAIN), seed, max_tokens=300, ending="\n</parameter>\n")
    if token_ids is None or "</parameter>" in decode(token_ids).replace("\n</parameter>\n", ""):
        return  # a string inside JSON may hold the mark

    calls = parsed(decode(token_ids), PLAIN)

    assert calls or choice == "auto"
    assert len(calls) <= 1 or parallel
    by_name = {tool["function"]["name"]: tool["function"]["parameters"] for tool in PLAIN}
    for one in calls:
        assert choice in ("auto", "required", one["name"])
        assert is_valid(by_name[one["name"]], one["arguments"])
        assert set(one["arguments"]) <= set(by_name[one["name"]]["properties"])


def test_random_walks_often_complete_a_call() -> None:
    matcher = matcher_for("required", True, PLAIN)

    assert sum(walk(matcher, seed, max_tokens=300, ending="\n</parameter>\n") is not None for seed in range(20)) >= 8


def test_stop_tokens_end_a_call_only_when_it_is_complete() -> None:
    masks = matcher_for().masks(encode(PARIS))

    assert [IM_END in allowed(row) for row in masks] == [False] * (len(masks) - 1) + [True]
