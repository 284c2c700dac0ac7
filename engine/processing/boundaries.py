"""Finds the boundaries of a prompt for the prefix cache by rendering its conversation again with other endings.

A template is a program, and its output does not tell where a message ends. But the common prefix of two renderings is
independent of their differing ends. A boundary must not lie inside a token: it is next to a control token, which
tokenizers split off first, or at a position where the tokens of the common text alone agree with the prompt's.
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
"""Renders messages, with or without generation prompt; None if the template refuses them."""

PROBES = ("Alpha", "Bravo")
"""Texts with different first characters, so that any other text differs there from at least one of them."""

MAX_TAIL = 64
"""Characters after a control token, such as a role and a line break, that a boundary leaves out to save tokenizing."""


class RenderedPrompt:
    """A prompt as text and as tokens, with the positions of its control tokens in both.

    Args:
        text: The rendered prompt, with the client's control strings escaped.
        token_ids: int32 [num_tokens].
        control: The tokenizer's control tokens.
        encode: Encodes a text that starts with a control token or at the start of the prompt, to int32 ids.
    """

    def __init__(self, text: str, token_ids: np.ndarray, control: ControlTokens, encode: Callable[[str], np.ndarray]):
        self.text = text
        self.token_ids = token_ids
        self._pattern = control.added
        self._encode = encode
        found = list(control.added.finditer(text))
        wanted = [control.ids[match[0]] for match in found]
        indices = np.flatnonzero(np.isin(token_ids, list(set(wanted))))
        if wanted != token_ids[indices].tolist():
            # Some tokenizers match added tokens only as whole words, or normalize first.
            found, indices = [], indices[:0]
        self._spans = [match.span() for match in found]
        self._indices = indices.tolist()

    def cut(self, others: Sequence[str]) -> int:
        """Return the tokens up to the last boundary in the common prefix with all other renderings; 0 if none."""
        end = min(num_common(self.text, other) for other in others)
        inside = bisect_right(self._spans, end, key=lambda span: span[1])
        if inside < len(self._spans) and (start := self._spans[inside][0]) <= end:
            end = start  # not inside a control string
            if all(len(other) == end or self._pattern.match(other, end) for other in others):
                return self._indices[inside]
        if not inside:
            return self._cut_text(0, end, 0)
        (last, last_end), index = self._spans[inside - 1], self._indices[inside - 1]
        return index + 1 if end - last_end <= MAX_TAIL else max(index + 1, self._cut_text(last, end, index))

    def _cut_text(self, start: int, end: int, index: int) -> int:
        """Return the last boundary in the text from `start` to `end`, whose first token has the index `index`.

        It is before the last token, which may differ if other text follows.
        """
        alone = self._encode(self.text[start:end])
        behind = self.token_ids[index : index + len(alone)]
        differing = np.flatnonzero(alone[: len(behind)] != behind)
        common = int(differing[0]) if len(differing) else len(behind)
        return index + max(0, min(common, len(alone) - 1))


def find_boundaries(messages: Messages, prompt: RenderedPrompt, render: Render) -> tuple[Boundary, ...]:
    """Find the boundaries `system` and `turn` of a rendered conversation, as far as possible, ascending by num_tokens.

    Args:
        messages: The conversation.
        prompt: The rendered conversation.
        render: Renders other conversations.
    """
    # At the same position the system boundary wins, as more prompts share it and it can be pinned.
    kinds: dict[int, BoundaryKind] = {_turn_cut(messages, prompt, render): "turn"}
    kinds[_system_cut(messages, prompt, render)] = "system"
    return tuple(Boundary(kinds[n], n) for n in sorted(kinds) if 0 < n < len(prompt.token_ids))


def _system_cut(messages: Messages, prompt: RenderedPrompt, render: Render) -> int:
    """Return the tokens in common with prompts of any other user text after the same system messages and tools.

    Without any, that is what the template itself writes in front, such as a default system message.
    """
    system = list(takewhile(lambda message: message.get("role") == "system", messages))
    probes = [render([*system, {"role": "user", "content": text}], True) for text in PROBES]
    shown = [probe for probe in probes if probe is not None]
    return prompt.cut(shown) if len(set(shown)) == len(PROBES) else 0


def _turn_cut(messages: Messages, prompt: RenderedPrompt, render: Render) -> int:
    """Return the tokens before the generation prompt, as far as the next turn does not change them.

    After a tool result the next turn only appends. A new user message may change what precedes it: some templates then
    drop thoughts or move the tools before the last question, so an answer and a question are tried.
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
    """Return the length of the common prefix, by bisection, as comparing slices is much faster than characters."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
