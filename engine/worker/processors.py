"""Logits processors: penalties, biases, forbidden stop tokens and grammar masks, in the order of SamplingParams.

Every verified position has its own history: the row's output so far and the draft tokens before the position. Output
tokens are counted on the device, because the host reads them one step late.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engine.core.row import Row
from engine.core.runner import NO_TOKEN, RowOutput
from engine.protocol import GRAMMAR_FAILED, SamplingParams


class LogitsProcessors:
    """The logits processors of a fixed set of rows. Parameters that no row uses cost nothing."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, penalties: "Penalties | None"):
        self._rows = list(rows)
        self._vocab_size = vocab_size
        self._penalties = penalties
        self._biased = [i for i, row in enumerate(rows) if row.sampling.logit_bias]
        self._bias = self._dense_bias() if self._biased else None
        self._delayed = [i for i, row in enumerate(rows) if row.sampling.min_tokens]
        if self._delayed:
            self._stops = self._stop_mask()
            self._min_tokens = mx.array([rows[i].sampling.min_tokens for i in self._delayed])[:, None, None]

    @classmethod
    def of(cls, rows: Sequence[Row], vocab_size: int) -> "LogitsProcessors":
        """Create the processors with the history that the host knows: all of `output_token_ids`."""
        return cls(rows, vocab_size, Penalties.of(rows, vocab_size))

    def joined(self, other: "LogitsProcessors") -> "LogitsProcessors":
        penalties = Penalties.joined(self._penalties, other._penalties, len(self._rows))
        return LogitsProcessors([*self._rows, *other._rows], self._vocab_size, penalties)

    def select(self, rows: list[int]) -> "LogitsProcessors":
        penalties = self._penalties.select(rows) if self._penalties is not None else None
        return LogitsProcessors([self._rows[i] for i in rows], self._vocab_size, penalties)

    def __call__(self, logits: mx.array, tokens: mx.array, positions: mx.array) -> mx.array:
        """Process logits.

        Args:
            logits: [B, L, vocab].
            tokens: int32 [B, L], the tokens before each position. tokens[:, 0] is counted already; the others are
                drafts.
            positions: int32 [B, L], output positions.

        Returns:
            The processed logits [B, L, vocab].
        """
        if self._penalties is None and self._bias is None and not self._delayed:
            return logits
        logits = logits.astype(mx.float32)
        if self._penalties is not None:
            logits = self._penalties(logits, tokens)
        if self._bias is not None:
            logits = logits.at[mx.array(self._biased)].add(self._bias)
        if self._delayed:
            at = mx.array(self._delayed)
            early = positions[at][..., None] < self._min_tokens
            logits[at] = mx.where(early & self._stops, -mx.inf, logits[at])
        return logits

    def commit(self, tokens: mx.array, num_kept: mx.array) -> None:
        """Count the first num_kept int32 [B] of the new tokens int32 [B, L]."""
        if self._penalties is not None:
            self._penalties.commit(tokens, num_kept)

    @property
    def state(self) -> list[mx.array]:
        return [] if self._penalties is None else [self._penalties.counts]

    def _dense_bias(self) -> mx.array:
        """Return float32 [rows with a bias, 1, vocab]."""
        bias = np.zeros((len(self._biased), 1, self._vocab_size), np.float32)
        for i, row in enumerate(self._biased):
            for token_id, value in self._rows[row].sampling.logit_bias:
                bias[i, 0, token_id] += value
        return mx.array(bias)

    def _stop_mask(self) -> mx.array:
        """Return bool [rows with min_tokens, 1, vocab]."""
        stops = np.zeros((len(self._delayed), 1, self._vocab_size), np.uint8)
        for i, row in enumerate(self._delayed):
            stops[i, 0, list(self._rows[row].spec.stop_token_ids)] = 1
        return mx.array(stops) > 0


ALL_ALLOWED = np.uint32(0xFFFFFFFF)
"""A word of a matcher's mask that allows all of its 32 tokens."""


def has_penalties(p: SamplingParams) -> bool:
    """Return whether any penalty is set."""
    return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1


@dataclass(slots=True, eq=False)
class Penalties:
    """The penalties of the R rows of a batch that use any."""

    rows: list[int]  # Indices of the rows.
    params: list[SamplingParams]  # Sampling parameters of these rows.
    counts: mx.array  # float32 [R, vocab], occurrences in the output.
    in_prompt: mx.array  # bool [R, vocab], occurrence in the prompt.
    _at: mx.array = field(init=False)
    _columns: tuple[mx.array, mx.array, mx.array] = field(init=False)

    def __post_init__(self) -> None:
        p = np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in self.params], np.float32)
        self._at = mx.array(self.rows)
        self._columns = (mx.array(p[:, 0, None, None]), mx.array(p[:, 1, None, None]), mx.array(p[:, 2, None, None]))

    @classmethod
    def of(cls, rows: Sequence[Row], vocab_size: int) -> "Penalties | None":
        """Create the penalties of the rows that use any; None without one."""
        index = [i for i, row in enumerate(rows) if has_penalties(row.sampling)]
        if not index:
            return None
        counts = np.stack([np.bincount(rows[i].output_token_ids, minlength=vocab_size) for i in index])
        in_prompt = np.stack([np.bincount(rows[i].spec.token_ids, minlength=vocab_size)[:vocab_size] for i in index])
        params = [rows[i].sampling for i in index]
        return cls(index, params, mx.array(counts.astype(np.float32)), mx.array(in_prompt) > 0)

    @staticmethod
    def joined(mine: "Penalties | None", other: "Penalties | None", num_mine: int) -> "Penalties | None":
        if other is None:
            return mine
        moved = Penalties([num_mine + i for i in other.rows], other.params, other.counts, other.in_prompt)
        if mine is None:
            return moved
        return Penalties(
            mine.rows + moved.rows,
            mine.params + moved.params,
            mx.concatenate([mine.counts, moved.counts]),
            mx.concatenate([mine.in_prompt, moved.in_prompt]),
        )

    def select(self, rows: list[int]) -> "Penalties | None":
        stay = [(new, self.rows.index(old)) for new, old in enumerate(rows) if old in self.rows]
        if not stay:
            return None
        at = mx.array([i for _, i in stay])
        params = [self.params[i] for _, i in stay]
        return Penalties([new for new, _ in stay], params, self.counts[at], self.in_prompt[at])

    def __call__(self, logits: mx.array, tokens: mx.array) -> mx.array:
        counts = self._counts_before(tokens[self._at])
        mine, said = logits[self._at], counts > 0
        repetition, frequency, presence = self._columns
        mine = mx.where(said | self.in_prompt[:, None], mx.where(mine > 0, mine / repetition, mine * repetition), mine)
        mine -= frequency * counts + presence * said
        logits[self._at] = mine
        return logits

    def commit(self, tokens: mx.array, num_kept: mx.array) -> None:
        """Count the first num_kept int32 [B] of the new tokens int32 [B, L]."""
        new = tokens[self._at]
        kept = (mx.arange(new.shape[1]) < num_kept[self._at][:, None]).astype(mx.float32)
        self.counts = self.counts.at[mx.arange(len(self.rows))[:, None], new].add(kept)

    def _counts_before(self, tokens: mx.array) -> mx.array:
        """Return counts [R, L, vocab] before each position. tokens [R, L]: the first is counted already."""
        steps = [self.counts]
        for i in range(1, tokens.shape[1]):
            steps.append(steps[-1].at[mx.arange(len(self.rows)), tokens[:, i]].add(1.0))
        return mx.stack(steps, axis=1)


def apply_grammar_masks(
    rows: Sequence[Row], logits: mx.array, drafts: Sequence[Sequence[int]], failed: Collection[int] = ()
) -> tuple[mx.array, dict[int, str]]:
    """Mask what the rows' grammars forbid after each of their drafts.

    A row whose matcher fails continues unmasked until it is removed.

    Args:
        rows: The rows of the batch.
        logits: [B, L, vocab].
        drafts: Draft tokens of each row.
        failed: Indices of rows whose matchers have failed before; they are skipped.

    Returns:
        Logits [B, L, vocab] with -inf for forbidden tokens, and why a matcher has failed now, by its row's index.
    """
    at, masks, errors = [], [], {}
    for i, row in enumerate(rows):
        if row.matcher is None or i in failed:
            continue
        try:
            mask = row.matcher.masks(tuple(drafts[i]))
        except Exception as error:
            errors[i] = f"{GRAMMAR_FAILED}{error}"
            continue
        if (mask != ALL_ALLOWED).any():  # a thought that no grammar follows allows everything
            masks.append(mask)
            at.append(i)
    return (_masked(logits, at, masks) if at else logits), errors


def advance_matcher(row: Row, token_ids: tuple[int, ...]) -> str | None:
    """Advance the row's matcher by sampled tokens; return why it failed, or None."""
    if row.matcher is None or NO_TOKEN in token_ids:
        return None
    try:
        row.matcher.advance(token_ids)
    except Exception as error:
        return f"{GRAMMAR_FAILED}{error}"
    return None


def advance_matchers(rows: Sequence[Row], first: Sequence[RowOutput]) -> None:
    """Advance the rows' matchers by their first tokens, once nothing can fail: otherwise these are sampled again."""
    for row, output in zip(rows, first, strict=True):
        output.error = output.error or advance_matcher(row, output.token_ids)


def _masked(logits: mx.array, rows: Sequence[int], masks: Sequence[np.ndarray]) -> mx.array:
    """Apply masks, uint32 [1 to L, words] per row.

    Positions without a mask follow a forbidden draft and do not matter.
    """
    length, vocab_size = logits.shape[1:]
    words = np.full((len(rows), length, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    for i, mask in enumerate(masks):
        words[i, : len(mask)] = mask[:, : words.shape[2]]
    bits = (mx.array(words)[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(len(rows), length, -1)[..., :vocab_size].astype(mx.bool_)
    at = mx.array(list(rows))
    logits = logits.astype(mx.float32)
    logits[at] = mx.where(allowed, logits[at], -mx.inf)
    return logits
