"""Where a prompt is cut for the prefix cache, found by rendering its conversation again with another end.

A template is a program, and nothing in its output tells where a message ends. But what two renderings have in common
does not depend on that in which they differ. A cut lies where no token can reach across: beside a control token, which
every tokenizer looks for before anything else, or where the tokens of the common text alone end too.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from engine.config import BoundaryKind
from engine.processing.control_tokens import ControlTokens
from engine.protocol import Boundary

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str | None]
"""The text of messages, with generation prompt or without; None if the template refuses them."""

PROBES = ("Alpha", "Bravo")
"""Texts that differ from the first character on, so that any text differs there from at least one of them."""

MAX_TAIL = 64
"""Characters that a cut may leave out so that nothing needs to be tokenised: a role's name, line breaks."""


class RenderedPrompt:
    """A prompt as text and as tokens, with the places of its control tokens in both.

    text: the control strings of its client are held back. token_ids: int32 [num_tokens]. encode: a text that begins
    with a control token, or where the prompt does, to ids, int32.
    """

    def __init__(self, text: str, token_ids: np.ndarray, control: ControlTokens, encode: Callable[[str], np.ndarray]):
        self.text = text
        self.token_ids = token_ids
        self._pattern = control.every
        self._encode = encode
        found = list(control.every.finditer(text))
        wanted = [control.ids[match[0]] for match in found]
        indices = np.flatnonzero(np.isin(token_ids, list(set(wanted))))
        if wanted != token_ids[indices].tolist():
            # Not every tokenizer finds each of its strings: some look for words of their own, or normalize first.
            found, indices = [], indices[:0]
        self._spans = [match.span() for match in found]
        self._indices = indices.tolist()

    def cut(self, others: Sequence[str]) -> int:
        """Number of tokens up to the last cut in what the prompt has in common with the beginning of each other
        rendering; 0 if there is none."""
        end = min(num_common(self.text, other) for other in others)
        inside = bisect_right(self._spans, end, key=lambda span: span[1])
        if inside < len(self._spans) and (start := self._spans[inside][0]) <= end:
            end = start  # not in the middle of a control string
            if all(len(other) == end or self._pattern.match(other, end) for other in others):
                return self._indices[inside]
        if not inside:
            return self._cut_text(0, end, 0)
        (last, last_end), index = self._spans[inside - 1], self._indices[inside - 1]
        return index + 1 if end - last_end <= MAX_TAIL else max(index + 1, self._cut_text(last, end, index))

    def _cut_text(self, start: int, end: int, index: int) -> int:
        """The last cut in the text from `start` to `end`, whose first token is number `index`: in front of its last
        token, as that may be another one with another text behind it."""
        alone = self._encode(self.text[start:end])
        behind = self.token_ids[index : index + len(alone)]
        differing = np.flatnonzero(alone[: len(behind)] != behind)
        common = int(differing[0]) if len(differing) else len(behind)
        return index + max(0, min(common, len(alone) - 1))


def find_boundaries(
    messages: Messages, kwargs: dict[str, Any], prompt: RenderedPrompt, render: Render
) -> tuple[Boundary, ...]:
    """Boundaries `system` and `turn` of a rendered conversation, by num_tokens; one that cannot be found is left out.

    kwargs: the variables of the template, which `render` uses.
    """
    # Of two at the same place the system boundary counts: it is shared by more prompts, and can be pinned.
    kinds: dict[int, BoundaryKind] = {_turn_cut(messages, prompt, render): "turn"}
    kinds[_system_cut(messages, kwargs, prompt, render)] = "system"
    return tuple(Boundary(kinds[n], n) for n in sorted(kinds) if 0 < n < len(prompt.token_ids))


def _system_cut(messages: Messages, kwargs: dict[str, Any], prompt: RenderedPrompt, render: Render) -> int:
    """What a prompt has in common with those of any other user text behind the same system messages and tools."""
    system = list(takewhile(lambda message: message.get("role") == "system", messages))
    if not system and not any(kwargs.get(name) for name in ("tools", "documents")):
        return 0
    probes = [render([*system, {"role": "user", "content": text}], True) for text in PROBES]
    shown = [probe for probe in probes if probe is not None]
    return prompt.cut(shown) if len(set(shown)) == len(PROBES) else 0


def _turn_cut(messages: Messages, prompt: RenderedPrompt, render: Render) -> int:
    """What a prompt has without its generation prompt, as far as the next turn leaves it as it is.

    Behind a tool's result the next turn is more of the same. A user's message ends what was said before: templates
    then take thoughts away, or move the tools in front of the last question, so an answer and a question are tried.
    """
    without = render(messages, False)
    if without is None:
        return 0
    if messages[-1].get("role") != "user":
        return prompt.cut([without])
    answer, question = PROBES
    behind = render([*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}], True)
    return prompt.cut([without] if behind is None else [without, behind])


def num_common(left: str, right: str) -> int:
    """Length of the common beginning, by halves: comparing slices is much faster than comparing characters."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
