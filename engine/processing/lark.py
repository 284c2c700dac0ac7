"""expression_of: turns a grammar in Lark's syntax into one regular expression that matches the same texts.

An expression can be enforced in any format of tool calls, also inside a JSON string, and intersected with what a text
may not contain. Direct recursion at either end of a rule becomes a repetition; other recursion is unrolled as often as
the size allows, so that deeper texts, which the grammar has, are not generated.

Syntax: https://lark-parser.readthedocs.io/en/stable/grammar.html, without templates, imports other than `common`, and
the directives that change other grammars.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TypeAlias

MAX_CHARS = 32_768
"""Characters of an expression."""

DEPTHS = (4, 3, 2, 1, 0)
"""How often a rule is unrolled inside itself; the first whose expression is not too long counts."""

COMMON: Mapping[str, str] = {
    "CNAME": r"[A-Za-z_][A-Za-z_0-9]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "CR": r"\r",
    "C_COMMENT": r"\/\*(?:[^*]|\*+[^*\/])*\*+\/",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\r\n]|\\[^\r\n])*"',
    "FLOAT": r"(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "SH_COMMENT": r"#[^\n]*",
    "SIGNED_FLOAT": r"[+\-]?(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "SIGNED_NUMBER": r"[+\-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "SQL_COMMENT": r"--[^\n]*",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""The terminals of Lark's library `common`."""

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\f\r\n]+|//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<expression>/(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<name>[?!]*[_A-Za-z][A-Za-z0-9_]*)
    |(?P<number>-?[0-9]+)
    |(?P<directive>%[a-z]+)
    |(?P<sign>->|\.\.|[|()\[\]{}?*+~:,.])""",
    re.VERBOSE,
)
_EXPRESSION_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*\]|[*+?}]\?|.", re.DOTALL)
_CHAR: re.Pattern[str] = re.compile(r"\\.|.", re.DOTALL)
_ESCAPED_CHARS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", '"': '"', "'": "'", "\\": "\\"}
_NAMED_CHARS: dict[str, str] = {
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
    "/": r"\/",
    "\\\n": r"\n",
    "\\\r": r"\r",
    "\\\t": r"\t",
}


@dataclass(frozen=True)
class Token:
    """A token of a grammar."""

    kind: str
    text: str


@dataclass(frozen=True)
class Leaf:
    """An expression."""

    expression: str


@dataclass(frozen=True)
class Name:
    """A reference to a rule or terminal."""

    name: str


@dataclass(frozen=True)
class Repeat:
    """A repeated part; `times` is an operator of expressions."""

    part: "Choice"
    times: str
    allows_none: bool


Item: TypeAlias = "Leaf | Name | Repeat | Choice"


@dataclass(frozen=True)
class Choice:
    """Alternative sequences."""

    options: tuple[tuple[Item, ...], ...]


def expression_of(grammar: str) -> str:
    """Return a regular expression in Rust's syntax, with `/` escaped, that matches texts of the grammar's rule `start`.

    Raises ValueError with the reason why there is none.
    """
    try:
        rules = _Grammar(grammar)
        for depth in DEPTHS:
            expression = rules.expanded(depth)
            if len(expression) <= MAX_CHARS:
                return expression
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    raise ValueError(f"the grammar has more than {MAX_CHARS} characters as a regular expression")


def normal_expression(expression: str) -> str:
    """Return a client's expression, which is to match a whole text, in the form of `expression_of`.

    Anchors at its ends and lazy quantifiers do not change what it matches; the library has neither.
    """
    parts = _EXPRESSION_PART.findall(expression)
    if parts and parts[0] == "^":
        parts = parts[1:]
    if parts and parts[-1] == "$":
        parts = parts[:-1]
    return "".join(part[0] if part[1:] == "?" else _spelled(part) for part in parts)


def _spelled(part: str) -> str:
    """Return a character, an escape or a class of characters without slashes and line breaks as they are."""
    return _CHAR.sub(lambda char: _NAMED_CHARS.get(char.group(), char.group()), part)


class _Grammar:
    """The rules and terminals of a grammar. Raises ValueError for what is not supported."""

    def __init__(self, grammar: str):
        self._rules: dict[str, Choice] = {}
        self._ignored: list[Choice] = []
        self._num_chars = 0
        for statement in _statements(list(_tokens(grammar))):
            self._add(statement)
        if "start" not in self._rules:
            raise ValueError("the grammar has no rule `start`")

    def _add(self, statement: list[Token]) -> None:
        head, body = statement[0], statement[1:]
        if head.text == "%ignore":
            self._ignored.append(_Parser(body).all())
        elif head.text == "%import":
            self._rules |= _imported(body)
        elif head.kind == "name":
            name = head.text.lstrip("?!")
            if name in self._rules:
                raise ValueError(f"the grammar defines {name!r} twice")
            colon = next(i for i, token in enumerate(body) if token.text == ":")
            if body[:colon] and body[0].text != ".":  # else a priority
                raise ValueError(f"the definition of {name!r} has {body[0].text!r}, which is not supported")
            self._rules[name] = _without_direct_recursion(name, _Parser(body[colon + 1 :]).all())
        else:
            raise ValueError(f"the grammar uses `{head.text}`, which is not supported")

    def expanded(self, depth: int) -> str:
        """Return the expression with rules unrolled `depth` times inside themselves."""
        self._num_chars = 0
        try:
            start = self._of(Name("start"), {}, depth, self._skipped(depth))
        except OverflowError:
            return " " * (MAX_CHARS + 1)
        if start is None:
            raise ValueError("no text matches the grammar")
        return start + self._skipped(depth)

    def _skipped(self, depth: int) -> str:
        """Return the expression of what is ignored in front of each terminal."""
        ignored = [expression for one in self._ignored if (expression := self._of(one, {}, depth, "")) is not None]
        return f"(?:{'|'.join(ignored)})*" if ignored else ""

    def _of(self, item: Item, inside: Mapping[str, int], depth: int, skipped: str) -> str | None:
        """Return the expression of an item inside of rules; None if no text is left within the depth."""
        match item:
            case Leaf():
                return self._counted(skipped + item.expression)
            case Name():
                return self._of_name(item.name, inside, depth, skipped)
            case Repeat():
                inner = self._of(item.part, inside, depth, skipped)
                return ("" if item.allows_none else None) if inner is None else f"(?:{inner}){item.times}"
            case Choice():
                options = [self._of_sequence(option, inside, depth, skipped) for option in item.options]
                left = list(dict.fromkeys(option for option in options if option is not None))
                return None if not left else left[0] if len(left) == 1 else f"(?:{'|'.join(left)})"

    def _of_name(self, name: str, inside: Mapping[str, int], depth: int, skipped: str) -> str | None:
        if name not in self._rules:
            raise ValueError(f"the grammar does not define {name!r}")
        if inside.get(name, 0) > depth:
            return None
        within = {**inside, name: inside.get(name, 0) + 1}
        if not name.lstrip("_")[:1].isupper():
            return self._of(self._rules[name], within, depth, skipped)
        terminal = self._of(self._rules[name], within, depth, "")
        return None if terminal is None else skipped + terminal

    def _of_sequence(self, option: Sequence[Item], inside: Mapping[str, int], depth: int, skipped: str) -> str | None:
        parts = []
        for item in option:
            part = self._of(item, inside, depth, skipped)
            if part is None:
                return None
            parts.append(part)
        return "".join(parts)

    def _counted(self, expression: str) -> str:
        self._num_chars += len(expression)
        if self._num_chars > MAX_CHARS:
            raise OverflowError
        return expression


class _Parser:
    """Parses the tokens of one definition."""

    def __init__(self, tokens: Sequence[Token]):
        self._tokens = tokens
        self._at = 0

    def all(self) -> Choice:
        choice = self._choice()
        if self._at < len(self._tokens):
            raise ValueError(f"the grammar has an unexpected {self._tokens[self._at].text!r}")
        return choice

    def _choice(self) -> Choice:
        options = [self._sequence()]
        while self._accept("|"):
            options.append(self._sequence())
        return Choice(tuple(options))

    def _sequence(self) -> tuple[Item, ...]:
        items: list[Item] = []
        while (token := self._next()) is not None and token.text not in ("|", ")", "]", "->"):
            items.append(self._repeated(self._atom()))
        if self._accept("->"):
            self._at += 1  # the name of the alternative
        return tuple(items)

    def _atom(self) -> Item:
        token = self._tokens[self._at]
        self._at += 1
        if token.text in ("(", "["):
            inner = self._choice()
            if not self._accept(")" if token.text == "(" else "]"):
                raise ValueError(f"the grammar has a {token.text!r} that is not closed")
            return inner if token.text == "(" else Repeat(inner, "?", True)
        if token.kind == "text":
            if self._accept(".."):
                return Leaf(_range_of(token.text, self._taken("text")))
            return Leaf(_literal(token.text))
        if token.kind == "expression":
            return Leaf(_of_literal_expression(token.text))
        if token.kind == "name":
            return Name(token.text)
        raise ValueError(f"the grammar has an unexpected {token.text!r}")

    def _repeated(self, item: Item) -> Item:
        part = item if isinstance(item, Choice) else Choice(((item,),))
        for times in ("?", "*", "+"):
            if self._accept(times):
                return Repeat(part, times, times != "+")
        if self._accept("~"):
            least = most = self._taken("number")
            if self._accept(".."):
                most = self._taken("number")
            return Repeat(part, f"{{{least},{most}}}", int(least) == 0)
        return item

    def _next(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _accept(self, text: str) -> bool:
        token = self._next()
        is_there = token is not None and token.kind == "sign" and token.text == text
        self._at += is_there
        return is_there

    def _taken(self, kind: str) -> str:
        token = self._next()
        if token is None or token.kind != kind:
            raise ValueError(f"the grammar has {'its end' if token is None else token.text!r} in place of a {kind}")
        self._at += 1
        return token.text


def _tokens(grammar: str) -> Iterator[Token]:
    at = 0
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        if match is None:
            line = grammar.count("\n", 0, at) + 1
            raise ValueError(f"line {line} of the grammar has {grammar[at : at + 20]!r}, which is not supported")
        at = match.end()
        if match.lastgroup != "skip":
            yield Token(match.lastgroup or "", match[0])


def _statements(tokens: list[Token]) -> Iterator[list[Token]]:
    """Split the tokens in front of directives, and of names with a colon behind them."""
    starts = [i for i, token in enumerate(tokens) if token.kind == "directive" or _begins_definition(tokens, i)]
    if tokens and starts[:1] != [0]:
        raise ValueError(f"the grammar begins with {tokens[0].text!r}; expected a rule, such as `start: ...`")
    for begin, end in pairwise([*starts, len(tokens)]):
        yield tokens[begin:end]


def _begins_definition(tokens: Sequence[Token], at: int) -> bool:
    if tokens[at].kind != "name" or (at and tokens[at - 1].text == "->"):
        return False
    after = [token.text for token in tokens[at + 1 : at + 4]]
    return after[:1] == [":"] or (after[:1] == ["."] and after[2:] == [":"]) or after[:1] == ["{"]


def _imported(body: Sequence[Token]) -> dict[str, Choice]:
    """Return the terminals of `%import common.NAME`, `%import common.NAME -> ALIAS` or `%import common (A, B)`."""
    words = [token.text for token in body if token.text not in (".", ",", "(", ")")]
    alias = words.pop() if "->" in words else None
    names = [word for word in words[1:] if word != "->"]
    unknown = [name for name in names if name not in COMMON]
    if words[:1] != ["common"] or not names or unknown:
        raise ValueError(f"the grammar imports {' '.join(unknown or words)!r}; it may only import from `common`")
    return {alias or name: Choice(((Leaf(COMMON[name]),),)) for name in names}


def _without_direct_recursion(name: str, choice: Choice) -> Choice:
    """Return a definition in which no alternative begins or ends with the name itself.

    A: A x | y A | A z A | b is the same as D (z D)* with D: y* b x*.
    """
    itself = Name(name)
    left, right, both, others = [], [], [], []
    for option in chain.from_iterable(_with_open_end(option, itself) for option in choice.options):
        if option == (itself,):
            continue
        if option[:1] == (itself,) and option[-1:] == (itself,):
            both.append(option[1:-1])
        elif option[:1] == (itself,):
            left.append(option[1:])
        elif option[-1:] == (itself,):
            right.append(option[:-1])
        else:
            others.append(option)
    if not (left or right or both):
        return choice
    one = Choice(((*_any_of(right), Choice(tuple(others)), *_any_of(left)),))
    more = _any_of([(*between, one) for between in both])
    return Choice(((one, *more),))


def _any_of(options: Sequence[tuple[Item, ...]]) -> tuple[Item, ...]:
    return (Repeat(Choice(tuple(options)), "*", True),) if options else ()


def _with_open_end(option: tuple[Item, ...], itself: Name) -> Iterator[tuple[Item, ...]]:
    """Yield an alternative with and without an optional end that ends with the name itself."""
    last = option[-1] if option else None
    if isinstance(last, Repeat) and last.times == "?" and any(inner[-1:] == (itself,) for inner in last.part.options):
        yield option[:-1]
        for inner in last.part.options:
            yield (*option[:-1], *inner)
    else:
        yield option


def _literal(text: str) -> str:
    ignores_case = text.endswith("i")
    escaped = _escaped(_unquoted(text.removesuffix("i") if ignores_case else text))
    return f"(?i:{escaped})" if ignores_case else escaped


def _unquoted(text: str) -> str:
    """Return the value of a literal, in which unknown escapes stand for themselves, as in Python."""

    def char(found: re.Match[str]) -> str:
        code = found[1][1:]
        value = chr(int(code, 16)) if code else _ESCAPED_CHARS.get(found[1], found[0])
        if "\ud800" <= value <= "\udfff":
            raise ValueError(f"the grammar has the literal {text}, which is not valid Unicode")
        return value

    return re.sub(r"(?s)\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", char, text[1:-1])


def _range_of(first: str, last: str) -> str:
    ends = _unquoted(first), _unquoted(last)
    if not all(len(end) == 1 for end in ends):
        raise ValueError(f"the grammar has the range {first}..{last}, whose ends must be single characters")
    return f"[{_escaped(ends[0])}-{_escaped(ends[1])}]"


def _of_literal_expression(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    normal = normal_expression(body)
    used = "".join(sorted(set(flags) & set("imsx")))
    return f"(?{used}:{normal})" if used else f"(?:{normal})"


def _escaped(text: str) -> str:
    return "".join(_NAMED_CHARS.get(char) or re.escape(char) for char in text)
