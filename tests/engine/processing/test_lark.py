"""Grammars in Lark's syntax as regular expressions, and their texts in calls of both formats."""

import json

import pytest
from llguidance import LLMatcher

from engine.errors import InvalidRequest
from engine.processing.grammar_build import byte_tokenizer
from engine.processing.lark import expression_of, normal_expression
from engine.processing.tool_grammar import JsonFunction, tool_call_grammar
from engine.protocol import GrammarSpec

SELECT = """
// a query
start: "SELECT"i _SP column ("," _SP column)* (_SP "LIMIT" _SP INT)? ";"
!column.2: NAME -> plain
    | NAME "(" [NAME] ")" -> call
NAME: "a".."f"~1..3
_SP: /[ ]+?/
%import common.INT
"""
SUM = r"""
start: sum
sum: sum "+" product | sum "-" product | product
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /\d+/
%import common.WS_INLINE
%ignore WS_INLINE
"""
LIST = 'start: items\nitems: ITEM | ITEM "," items\nITEM: /[a-z]/'
ESCAPES = r'start: "\x41\n\"\d\u00e4\\" | "\x"'
LINES = "start: line+\nline: /[^\\n\\/]*/ NL\nNL: /\\r?\\n/"
TEXTS = [
    (SELECT, ["SELECT a;", "select abc, d(e), f() LIMIT 10;"], ["SELECT g;", "SELECT a", "SELECT abcd;"]),
    (SUM, ["1", "1 + 2*3-4", "(1+(2*3)) - 4", "+".join("1" * 50)], ["", "1+", "(1", "1 2"]),
    (LIST, ["a", ",".join("abcdefghij" * 3)], ["", "a,", "A"]),
    (ESCAPES, ['A\n"\\dä\\', "\\x"], ["A"]),
    (LINES, ["a\n", "\r\n", "x\ny\n"], ["", "x", "a/b\n"]),
]


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def function(expression: str) -> dict[str, object]:
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    spec = GrammarSpec("regex", expression, "tools[0].format.definition")
    return {"name": "f", "parameters": {**schema, "additionalProperties": False}, "input_grammar": spec}


def xml_rules(expression: str) -> str:
    """The grammar of one call, without the tokens around it that a byte tokenizer does not have."""
    text = tool_call_grammar([{"function": function(expression)}], "required", False).text
    return "\n".join(line for line in text.split("\n") if not line.startswith(("call:", "start:"))) + "start: function"


@pytest.mark.parametrize(("grammar", "right", "wrong"), TEXTS, ids=["select", "sum", "list", "escapes", "lines"])
def test_a_text_is_accepted_in_both_formats_of_calls_exactly_if_the_grammar_has_it(grammar, right, wrong):
    expression = expression_of(grammar)
    xml, arguments = xml_rules(expression), f"start: {JsonFunction(function(expression), 'tools[0]').arguments()}"
    for text in (*right, *wrong):
        assert accepts(xml, f"<function=f>\n<parameter=input>\n{text}\n</parameter>\n") is (text in right), text
        assert accepts(arguments, json.dumps({"input": text}, ensure_ascii=False)) is (text in right), text


def test_a_text_does_not_spell_the_markup_of_calls():
    xml = xml_rules(expression_of("start: /[\\s\\S]+/"))
    for text in ("a</parameter>b", "<tool_call>", "</tool_call>"):
        assert not accepts(xml, f"<function=f>\n<parameter=input>\n{text}\n</parameter>\n")


@pytest.mark.parametrize(
    ("sent", "text"), [("^a+$", "aa"), ("a|b", "b"), ("a*?/b", "aa/b"), ("[/\n]x", "\nx"), (r"\^\$", "^$")]
)
def test_a_clients_expression_matches_the_whole_text(sent: str, text: str):
    grammar = f"start: T\nT: /{normal_expression(sent)}/\n"
    assert accepts(grammar, text) and not accepts(grammar, f"{text}~")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "no rule `start`"),
        ("begin: /a/", "no rule `start`"),
        ("start: a", "does not define 'a'"),
        ("start: /a/\nstart: /b/", "defines 'start' twice"),
        ('start: ("a"', "not closed"),
        ('start: "a" ?*', "unexpected '*'"),
        ("start: %json {}", "`%json`"),
        ("%import python.NAME\nstart: NAME", "may only import from `common`"),
        ("%declare A\nstart: A", "`%declare`"),
        ("_sep{x, s}: x (s x)*\nstart: _sep{A, B}", "not supported"),
        ("start: <|end|>", "line 1"),
        ('start: "(" start ")"', "no text matches"),
        ('start: "ab".."c"', "single characters"),
        (r'start: "\ud800"', "not valid Unicode"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
    ],
)
def test_a_grammar_without_an_expression_is_refused_with_the_reason(grammar: str, reason: str):
    with pytest.raises(ValueError) as refused:
        expression_of(grammar)
    assert reason in str(refused.value)


def test_an_expression_that_cannot_be_enforced_is_refused_by_its_place():
    with pytest.raises(InvalidRequest) as refused:
        JsonFunction(function("a(?=b)"), "tools[0]")
    assert refused.value.field == "tools[0].format.definition"
