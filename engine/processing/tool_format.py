"""ToolFormat: the markup of a model's tool calls, detected from the output of its chat template."""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.processing.call_body import CallBody, JsonBody, JsonScanner, MarkedBody
from engine.processing.call_reader import CallReader
from engine.processing.library_parser import library_parser
from engine.processing.shaped_call import CallShape, ShapedCall
from engine.processing.tool_arguments import ParsedToolCall, ToolTypes, parse_json
from engine.processing.xml_call import XmlCall, parse_xml

Parse = Callable[[str, ToolTypes], list[ParsedToolCall]]

NAMED_JSON = re.compile(r"\s*(.*?)\s*(\{.*)", re.DOTALL)
"""A function's name with markup around it, followed by its arguments."""
MARKUP = re.compile(r"<[|｜].*?[|｜]>|\[CALL_ID\]\s*\w*|\[ARGS\]|```(?:json)?|\s")


@dataclass(frozen=True)
class ToolFormat:
    """The markup of a model's tool calls."""

    name: str
    """For errors."""
    openings: tuple[str, ...]
    """Markers at the start of a call."""
    body: Callable[[str], CallBody]
    """Creates the collector of a call that starts with an opening."""
    parse: Parse
    """Parses the calls in a complete body. Raises ValueError if there is none."""
    noise: tuple[str, ...] = ()
    """Markup around calls, which is dropped."""
    starts_answer: bool = False
    """Whether an opening counts only at the start of the answer, after optional white space, else it is content."""
    shape: CallShape | None = None
    """Markup of calls with JSON arguments for a grammar; None: calls cannot be enforced by a JSON grammar."""
    inner: tuple[str, ...] = ()
    """Markup inside calls."""
    make_reader: Callable[[ToolTypes], CallReader] | None = None
    """Creates the reader of an enforced call without a shape; None: such a call is only parsed as a whole."""

    def reader(self, opening: str, types: ToolTypes) -> CallReader | None:
        """Return the reader of a call that a grammar enforces and that starts with an opening, see make_reader."""
        if self.shape is not None:
            return ShapedCall(self.shape, opening, types)
        return None if self.make_reader is None else self.make_reader(types)

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker of calls."""
        return (*self.openings, *self.noise, *self.inner)


def parse_objects(text: str, types: ToolTypes) -> list[ParsedToolCall]:
    """Parse {"name": ..., "arguments": {...}} or a list of these; `parameters` is accepted for `arguments`."""
    found = parse_json(text)
    calls = [_object_call(one, types) for one in (found if isinstance(found, list) else [found])]
    if not calls:
        raise ValueError("there is no call")
    return calls


def parse_bare_object(text: str, types: ToolTypes) -> list[ParsedToolCall]:
    """Parse {"name": ..., "parameters": {...}} without markup; the keys distinguish a call from other JSON."""
    found = parse_json(text)
    if not isinstance(found, dict) or not isinstance(found.get("parameters", found.get("arguments")), dict):
        raise ValueError("there are no arguments")
    return [_object_call(found, types)]


def parse_named(text: str, types: ToolTypes) -> list[ParsedToolCall]:
    """Parse a name and its arguments as JSON, with markup around them."""
    if text.lstrip()[:1] in ("[", "{") and not text.lstrip().startswith(("[ARGS]", "[CALL_ID]")):
        return parse_objects(text, types)
    match = NAMED_JSON.fullmatch(text)
    if match is None:
        raise ValueError("there are no arguments")
    header = [word for word in MARKUP.split(match[1]) if word]
    if not header:
        raise ValueError("there is no name")
    arguments = parse_json(match[2].strip().removesuffix("```"))
    return [_checked(_bare_name(header), arguments, types)]


def parse_pairs(key: str, value: str, text: str, types: ToolTypes) -> list[ParsedToolCall]:
    """Parse a name followed by keys and values in tags, whose names are `key` and `value`."""
    if text.lstrip().startswith("{"):
        return parse_objects(text, types)
    name = text.partition(f"<{key}>")[0].strip()
    if not name or len(name.split()) > 1:
        raise ValueError("there is no name")
    pairs = re.findall(rf"<{key}>(.*?)</{key}>\s*<{value}>(.*?)</{value}>(?=\s*(?:<{key}>|\Z))", text, re.DOTALL)
    return [types.call_of_texts(name, {key.strip(): text for key, text in pairs})]


def parse_with(module: str, text: str, types: ToolTypes) -> list[ParsedToolCall]:
    """Parse with one of mlx-lm's parsers."""
    try:
        found = library_parser(module)(text, types.tools)
    except Exception as error:  # the library's parsers raise arbitrary exceptions for unexpected text
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return [_object_call(one, types) for one in (found if isinstance(found, list) else [found])]


def _object_call(found: Any, types: ToolTypes) -> ParsedToolCall:
    if not isinstance(found, Mapping):
        raise ValueError("a call must be an object")
    inner = found["function"] if isinstance(found.get("function"), Mapping) else found
    return _checked(inner.get("name"), inner.get("arguments", inner.get("parameters", {})), types)


def _checked(name: Any, arguments: Any, types: ToolTypes) -> ParsedToolCall:
    if isinstance(arguments, str):
        arguments = parse_json(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, Mapping):
        raise ValueError("a call must have a name and an object of arguments")
    return types.call(name.strip(), arguments)


def _bare_name(header: list[str]) -> str:
    """Return the name without the word `function` before it (DeepSeek) or namespace and number around it (Kimi)."""
    name = header[1] if header[0] == "function" and len(header) > 1 else header[0]
    return re.sub(r"^functions\.(.*?)(?::\d+)?$", r"\1", name)


BEGINNING = '{"name":'


def begins_call(text: str) -> bool:
    """Tell whether the text may become a call of `parse_objects` with more text."""
    bare = "".join(text.split())
    return bare.startswith(BEGINNING) or BEGINNING.startswith(bare)


def _is_outside_of_strings(text: str) -> bool:
    scanner = JsonScanner()
    scanner.push(text)
    return not scanner.in_string


def _is_whole_xml(text: str) -> bool:
    return "<function=" not in text or text.rstrip().endswith(("</function>", "</parameter>"))


def _is_whole_python(text: str) -> bool:
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _has_pairs_of(mark: str) -> Callable[[str], bool]:
    return lambda text: text.count(mark) % 2 == 0


def _marked(name: str, opening: str, end: str, parse: Parse, **more: Any) -> ToolFormat:
    is_end = more.pop("is_end", lambda text: True)
    noise = (end, *more.pop("noise", ()))
    return ToolFormat(name, (opening,), lambda opening: MarkedBody(end, is_end), parse, noise, **more)


HARMONY_HEADERS = tuple(
    f"{start}{channel} to=functions."
    for start in ("<|start|>assistant", "")
    for channel in ("<|channel|>commentary", "<|channel|>analysis", "")
)

XML = _marked("XML", "<tool_call>", "</tool_call>", parse_xml, is_end=_is_whole_xml, make_reader=XmlCall)
JSON_OBJECTS = _marked("JSON", "<tool_call>", "</tool_call>", parse_objects, is_end=_is_outside_of_strings)
PAIRS = _marked(
    "GLM",
    "<tool_call>",
    "</tool_call>",
    partial(parse_pairs, "arg_key", "arg_value"),
    is_end=lambda text: text.rstrip().endswith("</arg_value>") or "<arg_key>" not in text,
)
LONGCAT = _marked(
    "LongCat",
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    partial(parse_pairs, "longcat_arg_key", "longcat_arg_value"),
    is_end=lambda text: text.rstrip().endswith("</longcat_arg_value>") or "<longcat_arg_key>" not in text,
)
KIMI = _marked(
    "Kimi",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    parse_named,
    is_end=_is_outside_of_strings,
    noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    inner=("<|tool_call_argument_begin|>",),
)
DEEPSEEK = _marked(
    "DeepSeek",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    parse_named,
    is_end=_is_outside_of_strings,
    noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    inner=("<｜tool▁sep｜>",),
)
GEMMA4 = _marked(
    "Gemma 4",
    "<|tool_call>",
    "<tool_call|>",
    partial(parse_with, "gemma4"),
    is_end=_has_pairs_of('<|"|>'),
    inner=('<|"|>',),
)
FUNCTION_GEMMA = _marked(
    "FunctionGemma",
    "<start_function_call>",
    "<end_function_call>",
    partial(parse_with, "function_gemma"),
    is_end=_has_pairs_of("<escape>"),
    inner=("<escape>",),
)
MINIMAX = _marked(
    "MiniMax",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    partial(parse_with, "minimax_m2"),
    is_end=lambda text: "<invoke" not in text or text.rstrip().endswith("</invoke>"),
)
PYTHONIC = _marked(
    "pythonic", "<|tool_call_start|>", "<|tool_call_end|>", partial(parse_with, "pythonic"), is_end=_is_whole_python
)
MISTRAL = ToolFormat(
    "Mistral",
    ("[TOOL_CALLS]",),
    lambda opening: JsonBody(),
    parse_named,
    inner=("[ARGS]", "[CALL_ID]"),
)
HARMONY = ToolFormat(
    "harmony",
    HARMONY_HEADERS,
    lambda opening: JsonBody("<|call|>"),
    parse_named,
    noise=("<|call|>",),
    inner=("<|constrain|>", "<|message|>", "<|channel|>"),
)
LLAMA = ToolFormat(
    "Llama JSON",
    ("<|python_tag|>", "{"),
    lambda opening: JsonBody(text=opening.removeprefix("<|python_tag|>"), is_call=begins_call),
    parse_bare_object,
    starts_answer=True,
)


@dataclass(frozen=True)
class Sign:
    """Strings by which a format is recognised."""

    format: ToolFormat
    strings: tuple[str, ...] = field(default=())
    """All of them occur in the output of the template."""


SIGNS = (
    Sign(HARMONY, ("<|channel|>", "to=functions.")),
    Sign(KIMI, ("<|tool_call_begin|>",)),
    Sign(DEEPSEEK, ("<｜tool▁call▁begin｜>",)),
    Sign(MISTRAL, ("[TOOL_CALLS]",)),
    Sign(MINIMAX, ("<minimax:tool_call>",)),
    Sign(GEMMA4, ("<|tool_call>", "<tool_call|>")),
    Sign(FUNCTION_GEMMA, ("<start_function_call>",)),
    Sign(LONGCAT, ("<longcat_tool_call>",)),
    Sign(PAIRS, ("<tool_call>", "<arg_key>")),
    Sign(PYTHONIC, ("<|tool_call_start|>",)),
    Sign(XML, ("<tool_call>", "<function=", "<parameter=")),
    Sign(JSON_OBJECTS, ("<tool_call>",)),
    Sign(LLAMA, ('"name": "probe_tool"',)),
    Sign(LLAMA, ("<|python_tag|>",)),
)
"""Tried in this order, as the strings of a later format may also occur in an earlier one."""

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
ASKED = {"role": "user", "content": "Uprobe"}
CALL_ID = "callprobe"
"""Nine letters, as Mistral's templates require."""


def find_tool_format(render: Callable[..., str | None], source: str, ends: re.Pattern[str]) -> ToolFormat | None:
    """Detect the format of tool calls.

    Args:
        render: Renders messages with template variables as keywords; returns None if the template refuses them.
        source: The template itself, for templates that do not render calls of the conversation.
        ends: Pattern of the special tokens, one of which ends an answer.

    Returns:
        None if the template has no tools or an unknown format of calls.
    """
    shown = render([ASKED], tools=[PROBE_TOOL]) or ""
    if "probe_tool" not in shown:
        return None
    for text in (_rendered_call(render), shown, source):
        for sign in SIGNS:
            if text and all(string in text for string in sign.strings):
                return replace(sign.format, shape=_find_shape(render, sign.format, ends))
    return None


def takes_argument_texts(render: Callable[..., str | None]) -> bool:
    """Tell whether the template accepts the arguments of a call only as JSON text, not as an object."""
    return _rendered_call(render, kinds=(dict,)) is None and _rendered_call(render, kinds=(str,)) is not None


def _rendered_call(
    render: Callable[..., str | None], num_calls: int = 1, kinds: tuple[type, ...] = (dict, str)
) -> str | None:
    """Return the text after the question in a rendered conversation with calls; None if the template refuses it."""
    for kind in kinds:
        arguments = {"key": "Vprobe"} if kind is dict else '{"key": "Vprobe"}'
        calls = [
            {"type": "function", "id": CALL_ID, "function": {"name": "probe_tool", "arguments": arguments}}
        ] * num_calls
        called = {"role": "assistant", "content": "", "tool_calls": calls}
        answered = {"role": "tool", "tool_call_id": CALL_ID, "name": "probe_tool", "content": "Rprobe"}
        for turns in ([ASKED, called], [ASKED, called, *[answered] * num_calls]):
            rendered = render(turns)
            if rendered is not None and rendered.count("Vprobe") == num_calls:
                return rendered.partition("Uprobe")[2]
    return None


def _find_shape(render: Callable[..., str | None], format: ToolFormat, ends: re.Pattern[str]) -> CallShape | None:
    """Return the markup around JSON arguments; None if it is ambiguous, or the parser could not read it."""
    one, two = (_pieces_of_calls(_rendered_call(render, num_calls), format, ends) for num_calls in (1, 2))
    if one is None or len(one) != 3:
        return None
    [begin, middle, end] = one
    joint = two[2] if two is not None and len(two) == 5 and [two[0], two[1], two[4]] == one else None
    shape = CallShape(begin, middle, joint, end)
    return shape if _is_understood(shape, format) else None


def _pieces_of_calls(text: str | None, format: ToolFormat, ends: re.Pattern[str]) -> list[str] | None:
    """Split rendered calls into the markup before the first name, before its arguments, ..., after the last ones."""
    if text is None:
        return None
    text = re.sub(rf',\s*"id":\s*"{CALL_ID}"', "", text)
    pieces = re.split(r'(?<![\w.])probe_tool|\{\s*"key"\s*:\s*"Vprobe"\s*\}', text.partition("Rprobe")[0])
    opening = min((at for marker in format.markers if (at := pieces[0].find(marker)) >= 0), default=-1)
    if opening < 0 or any(CALL_ID in piece for piece in pieces):
        return None
    pieces[0] = pieces[0][opening:]
    inside = set(format.markers)
    end = next((match.start() for match in ends.finditer(pieces[-1]) if match[0] not in inside), len(pieces[-1]))
    pieces[-1] = pieces[-1][:end].rstrip()
    return pieces


def _is_understood(shape: CallShape, format: ToolFormat) -> bool:
    text = f'{shape.begin}probe_tool{shape.middle}{{"key": "Vprobe"}}{shape.end}'
    opening = next((opening for opening in format.openings if opening in text), None)
    if opening is None:
        return False
    body = format.body(opening)
    if body.push(text.partition(opening)[2]) is None and body.finish() is None:
        return False
    try:
        return format.parse(body.text, ToolTypes(())) == [ParsedToolCall("probe_tool", '{"key": "Vprobe"}')]
    except ValueError:
        return False
