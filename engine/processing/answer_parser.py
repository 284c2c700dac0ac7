"""AnswerParser: parses the tokens of one choice incrementally into content, thought and tool calls."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from engine.processing.call_body import CallBody
from engine.processing.call_reader import CallReader
from engine.processing.control_tokens import any_of
from engine.processing.detokenizer import TokenDecoder
from engine.processing.reasoning_format import ReasoningFormat
from engine.processing.tool_arguments import ParsedToolCall, ToolTypes
from engine.processing.tool_format import ToolFormat

MAX_GAP = 64
"""Most characters of white space that are withheld because a marker may follow."""


@dataclass(frozen=True)
class AnswerRules:
    """Rules for parsing one choice."""

    stop: tuple[str, ...] = ()
    """Strings that end the answer; they apply to content only, not to thoughts and calls."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """OpenAI function tools that may be called; empty: calls are not parsed."""
    is_thinking: bool = False
    """Whether the prompt was rendered with thinking on."""
    is_raw: bool = False
    """Whether all text is content, as after a raw prompt."""
    is_constrained: bool = False
    """Whether a grammar decides the answer behind its thought: what spells a marker of thoughts is content."""
    enforces_calls: bool = False
    """Whether the grammar decides the calls too, so that their arguments are returned while they are generated."""


class AnswerDelta(NamedTuple):
    """New content, thought and calls of an answer."""

    content: str = ""
    """Text of the answer itself, without markup."""
    reasoning: str = ""
    """Text of the thought, without its markers."""
    tool_calls: tuple[ParsedToolCall, ...] = ()
    """Calls, or parts of them. A call that is not enforced comes as a whole, and never if the answer ends before."""
    num_reasoning_tokens: int = 0
    """How many of these tokens belong to the thought, its markers included."""


NOTHING = AnswerDelta()
new_tuple = tuple.__new__


class AnswerParser:
    """Parser of one choice. Text is returned once no later token can turn it into part of a marker or stop string.

    White space around thoughts and calls belongs to the template, which writes it again when the answer returns as
    history, so it is neither content nor reasoning. The stop string that is complete first wins, and the longer one if
    two end at the same character. The result does not depend on how the tokens are distributed over pushes.

    Attributes:
        stopped: Whether a stop string was found; the content ends before it, and further tokens are ignored.
        stop_sequence: The stop string that was found.
        num_tokens: Tokens consumed so far, up to and including the one that completed the stop string.
        has_tool_calls: Whether a call is complete.
    """

    def __init__(
        self, decoder: TokenDecoder, rules: AnswerRules, reasoning: ReasoningFormat | None, tools: ToolFormat | None
    ):
        self.stopped = False
        self.stop_sequence: str | None = None
        self.num_tokens = 0
        self.has_tool_calls = False
        self._decoder = decoder
        self._stop = tuple(s for s in rules.stop if s)
        self._tools = tools if rules.tools else None
        self._types = ToolTypes(rules.tools)
        self._in_thought = _thought_markup(reasoning)
        begins_in_thought = _starts_in_thought(reasoning, rules)
        has_thought = rules.is_thinking or (reasoning is not None and reasoning.always)
        has_thought_markers = not rules.is_constrained or (has_thought and not begins_in_thought)
        self._in_content = _content_markup(reasoning if has_thought_markers else None, self._tools)
        # Behind the thought of a constrained answer, at most the markup that begins the answer is none of its text.
        self._has_one_thought = rules.is_constrained and has_thought_markers
        self._begins_answer = reasoning.noise if reasoning is not None else ()
        self._is_free = self._free_of_markers()
        self._mark = self._only_mark()
        self._enforces_calls = rules.enforces_calls
        self._call: CallBody | None = None
        self._reader: CallReader | None = None
        self._is_thinking = begins_in_thought
        self._skips_space = self._is_thinking  # the next white space belongs to the template
        self._has_content = not self._in_content.kinds  # without markers, white space at the start is content
        self._has_reasoning = False
        self._held = ""
        self._content = self._reasoning = ""
        self._calls: list[ParsedToolCall] = []
        self._num_reasoning_tokens = 0
        self._is_plain = self._at_plain_content()

    def push(self, token_ids: Iterable[int]) -> AnswerDelta:
        """Parse tokens; return the output that is certain now. Ids outside the vocabulary (padding) have no text.

        Raises:
            ValueError: A call of which a part was returned goes on otherwise than its grammar allows.
        """
        if self.stopped:
            return NOTHING
        decoder, mark, is_plain, is_simple, num_tokens, plain = self._decoder, self._mark, self._is_plain, True, 0, ""
        for token_id in token_ids:  # hot loop: about a microsecond per token of every answer
            num_tokens += 1
            if decoder.is_quick:
                piece = decoder.step(token_id)
                piece = decoder.wait(token_id) if piece is None else piece
            else:
                piece = decoder.decode(token_id)
            if is_plain and (mark not in piece if mark else self._is_free(piece)):
                plain += piece
                continue
            self._content += plain
            plain, is_simple = "", False
            self._take(piece)
            if self.stopped:
                break
            is_plain, mark = self._is_plain, self._mark
        self.num_tokens += num_tokens
        if is_simple:
            return new_tuple(AnswerDelta, (plain, "", (), 0)) if plain else NOTHING  # half the time of AnswerDelta(...)
        self._content += plain
        return self._delta()

    def finish(self) -> AnswerDelta:
        """Return the withheld output at the end of the answer. An incomplete call stays as far as it was returned."""
        if self._call is not None and self._call.finish() is not None:
            self._end_call(self._call)
        elif self._is_thinking:
            self._think(self._held.rstrip())
        elif not (self.has_tool_calls and self._held.isspace()):
            self._answer(self._held)
        self._held = ""
        return self._delta()

    def _take(self, piece: str) -> None:
        was_thinking = self._is_thinking
        text: str | None = self._held + piece
        self._held = ""
        while text:
            if self._call is not None:
                text = self._take_call(self._call, text)
            elif self._is_thinking:
                text = self._take_thought(text)
            else:
                text = self._take_content(text)
        self._num_reasoning_tokens += was_thinking or self._is_thinking
        self._is_plain = self._at_plain_content()

    def _take_thought(self, text: str) -> str | None:
        """Parse text of a thought; return the text after a marker, None without one."""
        text = text.lstrip() if self._skips_space else text
        match = self._in_thought.find(text)
        if match is None:
            num_certain = self._in_thought.num_certain(text)
            self._think(text[:num_certain])
            self._held = text[num_certain:]
            return None
        self._think(text[: match.start()].rstrip())
        self._is_thinking, self._skips_space = self._in_thought.kinds[match[0]] != Kind.THOUGHT_END, True
        if not self._is_thinking and self._has_one_thought:
            self._use_markup(_markup_behind_thought(self._begins_answer, self._tools))
        return text[match.end() :]

    def _take_content(self, text: str) -> str | None:
        """Parse text of the content; return the text after a marker, None without one."""
        text = text.lstrip() if self._skips_space else text
        match = self._in_content.find(text)
        before = text if match is None else text[: match.start()].rstrip()
        if self._find_stop(before):
            return None
        if match is None:
            num_certain = self._num_certain_content(text)
            self._answer(text[:num_certain])
            self._held = text[num_certain:]
            return None
        self._answer(before)
        self._begin(self._in_content.kinds[match[0]], match[0])
        return text[match.end() :]

    def _begin(self, kind: "Kind", marker: str) -> None:
        """Enter the state that a marker in the content starts."""
        self._skips_space = kind != Kind.CALL or not self._has_content
        if kind == Kind.NOISE and self._has_one_thought and marker in self._begins_answer:
            self._use_markup(_content_markup(None, self._tools))
        if kind == Kind.THOUGHT:
            self._is_thinking = True
        elif kind == Kind.CALL:
            assert self._tools is not None
            self._call = self._tools.body(marker)
            self._reader = self._tools.reader(marker, self._types) if self._enforces_calls else None

    def _take_call(self, call: CallBody, text: str) -> str | None:
        rest = call.push(text)
        if self._reader is not None:
            try:
                self._add_calls(self._reader.push(text))
            except ValueError:
                if self._reader.has_begun:
                    raise
                self._reader = None
        if rest is not None:
            self._end_call(call)
        return rest

    def _end_call(self, call: CallBody) -> None:
        """Parse a complete call. Text that is no call becomes content, unless it contains markup."""
        assert self._tools is not None
        self._call = None
        if self._reader is not None and self._reader.has_begun:
            return
        try:
            self._add_calls(self._tools.parse(call.text, self._types))
        except ValueError:
            self._answer(call.text if "<" not in call.text or self._tools.starts_answer else "")

    def _add_calls(self, parts: Iterable[ParsedToolCall]) -> None:
        for part in parts:
            self.has_tool_calls = self.has_tool_calls or part.is_last
            if self._calls and not part.is_first:
                self._calls[-1] = self._calls[-1].joined(part)
            else:
                self._calls.append(part)

    def _think(self, text: str) -> None:
        if text:
            joint = "\n\n" if self._has_reasoning and self._skips_space else ""  # a second thought
            self._reasoning += joint + text
            self._has_reasoning, self._skips_space = True, False

    def _answer(self, text: str) -> None:
        if not text:
            return
        self._content += text
        self._skips_space = False
        if not self._has_content:
            self._has_content = True
            if self._has_one_thought:
                self._use_markup(_content_markup(None, self._tools))
            if self._tools is not None and self._tools.starts_answer:
                self._use_markup(self._in_content.without(Kind.CALL))

    def _use_markup(self, markup: "Markup") -> None:
        self._in_content = markup
        self._is_free, self._mark = self._free_of_markers(), self._only_mark()

    def _find_stop(self, text: str) -> bool:
        if not self._stop:
            return False
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            _, at, self.stop_sequence = min(found)
            self._answer(text[:at])
            self.stopped = True
        return self.stopped

    def _num_certain_content(self, text: str) -> int:
        """Return how many characters cannot become part of a marker, a stop string or the space before a marker."""
        has_gap = self._tools is not None or not self._has_content
        num_certain = self._in_content.num_certain(text, has_gap)
        if self._stop:
            longest = max(map(len, self._stop))
            starts = range(max(0, len(text) - longest + 1), num_certain)
            return next((at for at in starts if any(s.startswith(text[at:]) for s in self._stop)), num_certain)
        return num_certain

    def _free_of_markers(self) -> Callable[[str], object]:
        """Return a fast test for text that can be returned at once, as no marker or stop string starts in it."""
        first = self._in_content.first | {s[0] for s in self._stop}
        if self._tools is not None:  # nor white space that may precede a marker
            none_of = "".join(map(re.escape, first))
            return re.compile(rf"(?:[^{none_of}]*[^{none_of}\s])?\Z").match
        return first.isdisjoint

    def _only_mark(self) -> str:
        """Return the only first character of all markers and stop strings, for a fast test; '' if there are more."""
        first = self._in_content.first | {s[0] for s in self._stop}
        return "".join(first) if len(first) == 1 and self._tools is None else ""

    def _at_plain_content(self) -> bool:
        is_content = self._has_content and not self._is_thinking and self._call is None
        return is_content and not self._held and not self._skips_space

    def _delta(self) -> AnswerDelta:
        delta = AnswerDelta(self._content, self._reasoning, tuple(self._calls), self._num_reasoning_tokens)
        self._content = self._reasoning = ""
        self._calls = []
        self._num_reasoning_tokens = 0
        return delta


class Kind(Enum):
    """The meaning of a marker."""

    THOUGHT = "thought"
    """Start of a thought."""
    THOUGHT_END = "end of thought"
    CALL = "call"
    """Start of a call."""
    NOISE = "noise"
    """Dropped from the answer."""


class Markup:
    """The markers that may occur in one state of the parser.

    Attributes:
        kinds: Marker to its kind.
        first: First characters of the markers.
        find: Searches a text for a marker.
    """

    def __init__(self, kinds: Mapping[str, Kind]):
        self.kinds = kinds
        self.first = frozenset(marker[0] for marker in kinds)
        self.find = any_of(kinds).search
        self._longest = max(map(len, kinds), default=1)

    def num_certain(self, text: str, has_gap: bool = True) -> int:
        """Return how many characters cannot become part of a marker, or with has_gap of the space before one."""
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        at = next((at for at in starts if text[at] in self.first and self._begins_marker(text[at:])), len(text))
        if has_gap:
            at = max(len(text[:at].rstrip()), at - MAX_GAP)
        return at

    def without(self, kind: Kind) -> "Markup":
        """Return the markup without the markers of a kind."""
        return Markup({marker: other for marker, other in self.kinds.items() if other != kind})

    def _begins_marker(self, text: str) -> bool:
        return any(marker.startswith(text) for marker in self.kinds)


def _starts_in_thought(reasoning: ReasoningFormat | None, rules: AnswerRules) -> bool:
    return reasoning is not None and not reasoning.opening_ids and (rules.is_thinking or reasoning.always)


@lru_cache(64)
def _thought_markup(reasoning: ReasoningFormat | None) -> Markup:
    if reasoning is None:
        return Markup({})
    return Markup({reasoning.start: Kind.NOISE, reasoning.end: Kind.THOUGHT_END})


@lru_cache(64)
def _content_markup(reasoning: ReasoningFormat | None, tools: ToolFormat | None) -> Markup:
    kinds: dict[str, Kind] = {}
    if tools is not None:
        kinds |= dict.fromkeys(tools.noise, Kind.NOISE) | dict.fromkeys(tools.openings, Kind.CALL)
    if reasoning is not None:
        kinds |= dict.fromkeys((reasoning.end, *reasoning.noise), Kind.NOISE)
        kinds |= dict.fromkeys((reasoning.start, *reasoning.starts), Kind.THOUGHT)
    return Markup(kinds)


@lru_cache(64)
def _markup_behind_thought(begins_answer: tuple[str, ...], tools: ToolFormat | None) -> Markup:
    calls = _content_markup(None, tools).kinds
    return Markup({**dict.fromkeys(begins_answer, Kind.NOISE), **calls})
