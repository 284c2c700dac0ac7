"""ThoughtMatcher: constrains a thought by its budget, and then applies the grammar of the answer."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from engine.processing.grammar import GrammarMatcher
from engine.protocol import ThoughtSpec


class AnswerPhase(Enum):
    """Phase of an answer."""

    THINKING = "thinking"
    ANSWERING = "answering"
    ENDED = "ended"


@dataclass(frozen=True)
class State:
    """State of an answer before the first token of its grammar."""

    phase: AnswerPhase
    """Phase after the forced tokens."""
    forced: tuple[int, ...] = ()
    """Tokens that must come next, in this order."""
    num_thought: int = 0
    """Tokens of the thought so far."""


class ThoughtRules:
    """The tokens that are allowed in the thoughts of one request.

    Args:
        spec: The thought.
        stop_token_ids: Tokens that end the answer; they are forbidden in a thought before a grammar.
        vocab_size: Width of the logits.
        has_grammar: Whether a grammar follows the thought.
    """

    def __init__(self, spec: ThoughtSpec, stop_token_ids: tuple[int, ...], vocab_size: int, has_grammar: bool):
        self._spec = spec
        self._stop_token_ids = frozenset(stop_token_ids)
        self._vocab_size = vocab_size
        self._resume_ids = spec.resume_ids if has_grammar else ()
        self._any = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)  # padding too: the engine skips such a mask
        self._stop = self._mask_of(self._stop_token_ids)
        closing = self._mask_of([spec.end_id])
        self._thought = self._any & ~self._stop | closing if has_grammar else self._any

    def first(self) -> State:
        """Return the state at the start of the answer."""
        return self._thinking(0, self._spec.opening_ids)

    def next(self, state: State, token_id: int) -> State:
        """Return the state after a token. Raises ValueError for a token that the mask forbids."""
        if state.phase is AnswerPhase.ENDED:
            return state
        if state.forced and token_id != state.forced[0]:
            raise ValueError(f"token {token_id} was sampled, but token {state.forced[0]} is forced")
        if token_id in self._stop_token_ids:
            return State(AnswerPhase.ENDED)
        if state.forced:
            return replace(state, forced=state.forced[1:])
        if state.phase is AnswerPhase.ANSWERING:
            return state
        if token_id == self._spec.end_id:
            return State(AnswerPhase.ANSWERING, self._resume_ids)
        return self._thinking(state.num_thought + 1)

    def mask(self, state: State) -> np.ndarray:
        """Return the mask of the next token, uint32 [ceil(vocab_size / 32)]."""
        if state.forced:
            return self._mask_of(state.forced[:1])
        if state.phase is AnswerPhase.ENDED:
            return self._stop
        return self._any if state.phase is AnswerPhase.ANSWERING else self._thought

    def _thinking(self, num_thought: int, opening_ids: tuple[int, ...] = ()) -> State:
        if self._spec.budget is not None and num_thought >= self._spec.budget:
            return State(AnswerPhase.ANSWERING, opening_ids + self._spec.closing_ids)
        return State(AnswerPhase.THINKING, opening_ids, num_thought)

    def _mask_of(self, token_ids: Iterable[int]) -> np.ndarray:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


class ThoughtMatcher:
    """A `core.row.Matcher` of an answer that starts with a thought. Not thread-safe.

    Args:
        rules: Rules of the thought.
        inner: Matcher of the grammar after the thought, in its first state; None: any text follows.
        state: Current state; default: the first one.
    """

    def __init__(self, rules: ThoughtRules, inner: GrammarMatcher | None, state: State | None = None):
        self._rules = rules
        self._inner = inner
        self._state = state or rules.first()

    def masks(self, draft: tuple[int, ...] = ()) -> np.ndarray:
        """Return the masks for the next token and after each draft token; see `core.row.Matcher`.

        Returns:
            uint32 [1 to len(draft) + 1, ceil(vocab_size / 32)].

        Raises:
            ValueError: See GrammarMatcher.masks.
        """
        state, rows = self._state, []
        for i in range(len(draft) + 1):
            if (inner := self._active(state)) is not None:
                rest = inner.masks(draft[i:])
                return np.concatenate([np.stack(rows), rest]) if rows else rest
            rows.append(self._rules.mask(state))
            if i == len(draft) or not _allows(rows[i], draft[i]):
                break
            state = self._rules.next(state, draft[i])
        return np.stack(rows)

    def advance(self, token_ids: tuple[int, ...]) -> None:
        """Advance over generated tokens. Raises ValueError for a token that the mask forbids."""
        for i, token_id in enumerate(token_ids):
            if (inner := self._active(self._state)) is not None:
                inner.advance(token_ids[i:])
                return
            self._state = self._rules.next(self._state, token_id)

    def fork(self) -> "ThoughtMatcher":
        return ThoughtMatcher(self._rules, None if self._inner is None else self._inner.fork(), self._state)

    def _active(self, state: State) -> GrammarMatcher | None:
        """Return the grammar's matcher if the state is after the thought, else None."""
        return self._inner if state.phase is AnswerPhase.ANSWERING and not state.forced else None


def _allows(row: np.ndarray, token_id: int) -> bool:
    return 0 <= token_id < 32 * len(row) and bool(int(row[token_id >> 5]) >> (token_id & 31) & 1)
