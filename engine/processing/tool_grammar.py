"""Grammars of tool calls in llguidance's Lark dialect: for JSON formats, and for the XML of Qwen3-Coder and Qwen3.5.

The XML is:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

`<tool_call>` and `</tool_call>` are single tokens, everything else is text. A value is raw text if the schema allows a
string, otherwise JSON. The grammar does not prevent `</parameter>` in strings inside a JSON value.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from engine.errors import InvalidRequest
from engine.processing.control_tokens import any_of
from engine.processing.json_schema import strict_schema, with_options
from engine.processing.schema_keywords import ANNOTATIONS, ROOT_ANNOTATIONS, subschemas
from engine.processing.schema_problems import pattern_error
from engine.processing.shaped_call import CallShape
from engine.processing.tool_arguments import ToolTypes
from engine.processing.tool_format import XML
from engine.processing.tool_schema import ANY_OBJECT, tool_schema
from engine.protocol import GrammarSpec

MARKUP = r"<(\/parameter|\/?tool_call)>"
"""Expression of control tokens that texts of arguments do not spell."""

HEAD = rf"""%llguidance {{}}
TEXT: /(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/
NAME: /[^\s<>]([^\n\r<>]{{0,62}}[^\s<>])?/
VALUE: /(?s:.*)/ & ~/(?s:.*){MARKUP}(?s:.*)/ & ~/[Nn][Uu][Ll][Ll]/
END: "\n</parameter>\n"
RAW: VALUE END
call: <tool_call> "\n" function "</function>\n" </tool_call>
"""
"""TEXT and VALUE do not spell the control tokens, which a parser of the decoded text would take for real ones. VALUE is
not `null`, which parsers read as None in place of a string (mlx_lm.tool_parsers.qwen3_coder 0.32.2)."""

NAME = re.compile(r"[^\s<>]+")
"""Names of functions that parsers can distinguish from the markup."""
PARAMETER_NAME = re.compile(r"[^\s<>](?:[^\n\r<>]*[^\s<>])?")
"""Names of parameters, which may contain spaces."""
NEVER_IN_NAMES = "be empty, contain '<', '>' or line breaks, nor have spaces at its ends"

TOOLS_FIELD = "tools"
"""Field of the grammars in which calls may occur."""

TOP_LEVEL = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
MAX_REFERENCES = 8
"""Most references from a function's parameters to their schema."""
RAW_LIMITS = ("pattern", "format", "minLength", "maxLength")


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    parallel: bool,
    names: Sequence[str] = (),
    answer: GrammarSpec | None = None,
) -> GrammarSpec:
    """Return the grammar of an answer that may or must call tools in the XML format.

    Parameters are in the order of their schema, required ones always present. Schemas are enforced as far as possible.

    Args:
        tools: OpenAI function tools.
        choice: 'auto' (text, then optionally calls), 'required' (only calls), or the name of the function to call.
        parallel: Whether several calls are allowed, one per line. The answer ends after its last call.
        names: Functions that may be called; empty: all.
        answer: Grammar of an answer without calls; with 'auto' it replaces the text.

    Raises:
        InvalidRequest: A function with `strict` cannot be enforced, or a name cannot be written in the format.
    """
    wanted = names or ([] if choice in ("auto", "required") else [choice])
    chosen = [
        _Function(tool["function"], f"f{i}", f"tools[{i}].function")
        for i, tool in enumerate(tools)
        if not wanted or tool["function"]["name"] in wanted
    ]
    check_names([function.name for function in chosen], wanted)
    calls = r'call ("\n" call)*' if parallel else "call"
    rules = [start_rule(choice, calls, answer)]
    rules.append("function: " + " | ".join(function.rule for function in chosen))
    rules += [rule for function in chosen for rule in function.rules()]
    left_open = tuple(f"tools ({function.name}): {place}" for function in chosen for place in function.left_open)
    return GrammarSpec("lark", HEAD + "\n".join(rules) + "\n", TOOLS_FIELD, left_open)


def no_call_grammar(openings: Sequence[str]) -> GrammarSpec:
    """Return the grammar of a text without any of these strings."""
    return GrammarSpec("lark", f"%llguidance {{}}\n{text_rule(openings)}\nstart: TEXT\n", "tool_choice")


def text_rule(openings: Sequence[str]) -> str:
    """Return the rule of a text without any of these strings. Text never includes control tokens."""
    escaped = [re.escape(opening).replace("/", r"\/") for opening in openings]
    return rf"TEXT: /(?s:.*)/ & ~/(?s:.*)({'|'.join(escaped)})(?s:.*)/"


def start_rule(choice: str, calls: str, answer: GrammarSpec | None) -> str:
    """Return the start rule of a grammar with calls; for the arguments see `tool_call_grammar`."""
    if choice != "auto":
        return f"start: {calls}"
    if answer is None:
        return f"start: TEXT ({calls})?"
    return f"start: ({calls}) | answer\nanswer: {_answer(answer)}"


def check_names(there: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise InvalidRequest for a required name that no tool has."""
    for name in wanted:
        if name not in there:
            raise InvalidRequest(f"tool_choice is {name!r}; no tool has this name", "tool_choice")


def _answer(answer: GrammarSpec) -> str:
    try:
        if answer.kind == "json_schema":
            return f"%json {json.dumps(with_options(strict_schema(json.loads(answer.text))))}"
        if answer.kind == "json_object":
            return f"%json {json.dumps(with_options({'type': 'object'}))}"
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "the schema is nested too deeply"
        raise InvalidRequest(f"`{answer.field}`: {reason}", answer.field) from None
    raise InvalidRequest(f"`{answer.field}`: a {answer.kind} grammar and tools cannot be combined", answer.field)


def input_expression(function: Mapping[str, Any]) -> str | None:
    """Return the regular expression of a function's only argument; None if it has none. Raises InvalidRequest."""
    spec: GrammarSpec | None = function.get("input_grammar")
    if spec is None:
        return None
    if error := pattern_error(f"^(?:{spec.text})$"):
        raise InvalidRequest(f"`{spec.field}`: {error}", spec.field)
    return spec.text


def _with_pattern(parameters: Mapping[str, Any], expression: str) -> dict[str, Any]:
    [(name, schema)] = parameters["properties"].items()
    return {**parameters, "properties": {name: {**schema, "pattern": f"^(?:{expression})$"}}}


class JsonFunction:
    """A function whose arguments are one JSON object.

    Args:
        function: OpenAI function.
        path: Path of the function in the request, for errors.
    """

    def __init__(self, function: Mapping[str, Any], path: str):
        self.name: str = function["name"]
        self._path = f"{path}.parameters"
        self.left_open: tuple[str, ...] = ()
        self._strict = bool(function.get("strict"))
        self._parameters = {"type": "object", **(function.get("parameters") or {})}
        if (expression := input_expression(function)) is not None:
            self._strict = True
            self._parameters = _with_pattern(self._parameters, expression)

    def arguments(self) -> str:
        """Return the rule of the arguments. Raises InvalidRequest if a strict function cannot be enforced."""
        try:
            schema, self.left_open = tool_schema(self._parameters, self._strict)
        except ValueError as error:
            raise InvalidRequest(f"`{self._path}`: {error}", self._path) from None
        return f"%json {json.dumps(with_options(schema))}"


def json_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    parallel: bool,
    names: Sequence[str],
    answer: GrammarSpec | None,
    shape: CallShape,
    openings: Sequence[str],
    control_ids: Mapping[str, int],
) -> GrammarSpec:
    """Return the grammar of an answer with calls in a JSON format.

    Args:
        tools: As in `tool_call_grammar`.
        choice: 'auto' (text, then optionally calls); any other value: only calls.
        parallel: Whether several calls are allowed, if the format has a separator between calls.
        names: As in `tool_call_grammar`.
        answer: As in `tool_call_grammar`.
        shape: Markup around names and arguments.
        openings: Strings that text without calls must not contain.
        control_ids: String to id of the added tokens, which text cannot spell.
    """
    functions = [JsonFunction(tool["function"], f"tools[{i}].function") for i, tool in enumerate(tools)]
    chosen = [(i, function) for i, function in enumerate(functions) if not names or function.name in names]
    check_names([function.name for _, function in chosen], names)

    def literal(text: str) -> str:
        pieces = re.split(f"({any_of(control_ids).pattern})", text)
        terms = [f"<[{control_ids[piece]}]>" if i % 2 else _literal(piece) for i, piece in enumerate(pieces) if piece]
        return " ".join(terms)

    more = f"({literal(shape.joint)} function)*" if parallel and shape.joint is not None else ""
    rules = [
        start_rule(choice, f"{literal(shape.begin)} function {more} {literal(shape.end)}", answer),
        "function: " + " | ".join(f"f{i}" for i, _ in chosen),
        *(f"f{i}: {literal(function.name + shape.middle)} f{i}_arguments" for i, function in chosen),
        *(f"f{i}_arguments: {function.arguments()}" for i, function in chosen),
    ]
    head = ["%llguidance {}", text_rule(openings)]
    left_open = tuple(f"tools ({function.name}): {place}" for _, function in chosen for place in function.left_open)
    return GrammarSpec("lark", "\n".join([*head, *rules]) + "\n", TOOLS_FIELD, left_open)


class _Function:
    """The rules of one function in XML.

    Args:
        function: OpenAI function.
        rule: Name of the function's first rule.
        path: Path of the function in the request, for errors.
    """

    def __init__(self, function: Mapping[str, Any], rule: str, path: str):
        self.rule = rule
        self.name = _checked_name(function["name"], f"{path}.name")
        self._path = f"{path}.parameters"
        self._strict = bool(function.get("strict"))
        self._input = input_expression(function)
        self.left_open: list[str] = []
        try:
            self._schema, left_open = tool_schema(self._checked(function.get("parameters") or {}), self._strict)
            self.left_open += left_open
        except ValueError as error:
            if self._strict:
                raise self._refused(str(error)) from None
            self._leave_open("$")
            self._schema = dict(ANY_OBJECT)
        if "$" in self.left_open:
            self._schema = {**self._schema, "additionalProperties": {}}
        self._places = dict(subschemas(self._schema))

    def rules(self) -> list[str]:
        properties = self._schema.get("properties", {})
        required = self._schema.get("required", [])
        undeclared = [name for name in required if not isinstance(name, str) or name not in properties]
        if undeclared:
            self._leave_open("$.required", f"`required` names {undeclared[0]!r}, which is not in `properties`")
        parts, rules = [_literal(f"<function={self.name}>\n")], []
        for i, (name, schema) in enumerate(properties.items()):
            if not PARAMETER_NAME.fullmatch(name):
                self._leave_open(f"$.properties.{name}", f"{name!r} is not a valid name; it must not {NEVER_IN_NAMES}")
                continue
            rule, opening = f"{self.rule}_{i}", _literal(f"<parameter={name}>\n")
            parts.append(rule if name in required else f"{rule}?")
            if self._input is None:
                rules.append(f"{rule}: {opening} {self._value(schema, name)}")
            else:
                rules += [f"{rule}: {opening} INPUT_{rule.upper()}", *_input_rules(rule.upper(), self._input)]
        if extra := self._schema.get("additionalProperties"):
            taken = "".join(f" & ~{_literal(name)}" for name in properties)
            parts.append(f"{self.rule}_extra*")
            rules.append(f"{self.rule.upper()}_NAME: NAME{taken}")
            value = self._value(extra, "additionalProperties")
            rules.append(rf'{self.rule}_extra: "<parameter=" {self.rule.upper()}_NAME ">\n" {value}')
        return [f"{self.rule}: {' '.join(parts)}", *rules]

    def _checked(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters with an object's schema at their top. Raises ValueError if they are none."""
        known = TOP_LEVEL | ANNOTATIONS | ROOT_ANNOTATIONS
        checked = _without_nulls(_dereferenced(parameters))
        types = checked.get("type", "object")
        if types != "object" and not (isinstance(types, list) and "object" in types):
            raise ValueError(f"`type` is {checked['type']!r}; it must be 'object'")
        for key, kind, expected in (("properties", dict, "an object"), ("required", list, "an array")):
            if not isinstance(checked.get(key, kind()), kind):
                raise ValueError(f"`{key}` is {checked[key]!r}; expected {expected}")
        for key in [key for key in checked if key not in known and not key.startswith("x-")]:
            self._leave_open(f"$.{key}", f"the schema uses `{key}` at $, which is not supported")
            del checked[key]
        return {**checked, "type": "object"}

    def _leave_open(self, place: str, reason: str = "") -> None:
        """Note a part that the grammar does not enforce. Raises InvalidRequest with the reason if it has to."""
        if self._strict:
            raise self._refused(reason)
        self.left_open.append(place)

    def _value(self, schema: Any, name: str) -> str:
        """Return the rule for the text after a parameter's opening line, its closing line included."""
        kinds = list(self._alternatives(schema, frozenset()))
        raw = [kind for kind in kinds if _is_raw(kind)]
        if self._strict and (limit := next((key for kind in raw for key in RAW_LIMITS if _has(kind, key)), None)):
            raise self._refused(f"the schema uses `{limit}` in the parameter {name!r}, whose text cannot be limited")
        if raw:
            return "RAW"
        if not any(isinstance(value, str) for kind in kinds for value in _constants(kind) or ()):
            return f"{self._json(schema)} END"
        values = [value for kind in kinds for value in _constants(kind) or ()]
        others = [self._json(kind) for kind in kinds if _constants(kind) is None]
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        if unspeakable := [text for text in texts if not self._can_be_written(name, text)]:
            reason = f"{unspeakable[0]!r} cannot be a value of {name!r}: in it the markup of calls ends a value"
            self._leave_open(f"$.properties.{name}", reason)
            return "RAW"
        return f"({' | '.join([*map(_literal, texts), *others])}) END"

    def _can_be_written(self, name: str, text: str) -> bool:
        """Tell whether a parser reads a text back as the value of a parameter, alone and before another one."""
        strings = {"function": {"name": self.name, "parameters": {"properties": {name: {"type": "string"}}}}}
        for more in ("", "<parameter=other>\n1\n</parameter>\n"):
            value = f"<parameter={name}>\n{text}\n</parameter>\n"
            body = XML.body("<tool_call>")
            if body.push(f"\n<function={self.name}>\n{value}{more}</function>\n</tool_call>") != "":
                return False
            calls = XML.parse(body.text, ToolTypes([strings]))
            if len(calls) != 1 or json.loads(calls[0].arguments).get(name) != text:
                return False
        return True

    def _alternatives(self, schema: Any, seen: frozenset[str]) -> Iterator[Any]:
        """Yield the alternatives of a schema, following references; the schema itself if it has none."""
        decided = not isinstance(schema, dict) or "type" in schema or _constants(schema) is not None
        options = (
            [] if decided else _listed(schema, "anyOf") or _listed(schema, "oneOf") or _listed(schema, "allOf")[:1]
        )
        if not decided and "$ref" in schema and schema["$ref"] not in seen:
            seen |= {schema["$ref"]}
            options = [self._places[unquote(schema["$ref"][1:])]]
        if not options:
            yield schema
        for option in options:
            yield from self._alternatives(option, seen)

    def _json(self, schema: Any) -> str:
        """Return the rule of a schema, with the function's whole schema under $defs if it has references into it."""
        alone = copy.deepcopy(schema) if isinstance(schema, dict) else {}
        if any("$ref" in part for _, part in subschemas(alone) if isinstance(part, dict)):
            whole = copy.deepcopy(self._schema)
            _move_references(alone)
            _move_references(whole)
            alone["$defs"] = {"parameters": whole}
        return f"%json {json.dumps(with_options(alone))}"

    def _refused(self, reason: str) -> InvalidRequest:
        return InvalidRequest(f"`{self._path}`: {reason}", self._path)


def _input_rules(name: str, expression: str) -> list[str]:
    """Return the rules of a text that matches an expression and does not spell markup, and of its closing line."""
    return [f"INPUT_{name}: TEXT_{name} END", f"TEXT_{name}: /{expression}/ & ~/(?s:.*){MARKUP}(?s:.*)/"]


def _is_raw(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return True
    types = schema.get("type", "string")
    return _constants(schema) is None and ("string" in types if isinstance(types, list) else types == "string")


def _has(schema: Any, keyword: str) -> bool:
    return isinstance(schema, dict) and keyword in schema


def _constants(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    return [schema["const"]] if "const" in schema else _listed(schema, "enum") or None


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _dereferenced(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters with the schema that a `$ref` at their top refers to in place of it."""
    places = dict(subschemas(dict(parameters)))
    for _ in range(MAX_REFERENCES):
        if "$ref" not in parameters:
            return parameters
        reference = parameters["$ref"]
        target = places.get(unquote(reference[1:])) if isinstance(reference, str) else None
        if not isinstance(target, dict):
            break
        parameters = {**copy.deepcopy(target), **{key: value for key, value in parameters.items() if key != "$ref"}}
    raise ValueError(f"`$ref` is {parameters['$ref']!r}, which does not lead to an object's schema")


def _move_references(root: dict[str, Any]) -> None:
    for _, schema in subschemas(root):
        if isinstance(schema, dict) and "$ref" in schema:
            schema["$ref"] = "#/$defs/parameters" + schema["$ref"][1:]


def _without_nulls(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if value is not None}


def _checked_name(name: str, path: str) -> str:
    if not NAME.fullmatch(name):
        reason = f"{name!r} is not a valid name; it must not contain spaces, '<' or '>'"
        raise InvalidRequest(f"`{path}`: {reason}", path)
    return name


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
