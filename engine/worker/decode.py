"""One decode group: rows that step together. Draft, verify in one forward, accept and commit, all on the device.

A step launches the next forward before it reads the tokens of the previous one, so that the device computes while
tokens are transferred. The host need not know what was accepted: lengths, newest tokens, output positions and histories
are on the device. Only a row with a grammar makes the step wait, after the launch, for the tokens that its matcher must
consume, and a proposer that reads the tokens makes it wait before the launch. Rows join and leave between steps.

When the host learns that a row has finished, the next step, which still contains the row, is in flight. The device
knows the row's last token and keeps nothing after it, so that step adds only this last token to the row's cache: the
state is where the next turn of a conversation continues, and can be taken with `DecodeGroup.snapshot` until the row is
removed.

The target samples at each verified position, and a draft token is accepted if it equals the sample, so the output is
that of plain decoding at any temperature. Drafts are sampled with the noise of their own positions (Gumbel coupling;
Daliri, Musco, Suresh 2024, arXiv 2408.07978): at total variation distance d, head and target then agree with a
probability of at least (1 - d) / (1 + d).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.core.row import Row
from engine.core.runner import NO_TOKEN, PLAIN, Drafts, RowOutput, RowSnapshot
from engine.worker.acceptance import Acceptance
from engine.worker.compiled import CompiledForward
from engine.worker.drafters import Drafters
from engine.worker.drafting_models import DraftingModels
from engine.worker.kv_cache import BatchCache, SequenceCache
from engine.worker.language_model import LanguageModel
from engine.worker.layer_kinds import appends
from engine.worker.pending_step import DecodingRow, PendingStep
from engine.worker.proposers import row_drafts
from engine.worker.sampling_batch import SamplingBatch
from engine.worker.snapshot import DeviceSegment, LentSegments, StateSnapshot, fill, is_finite, take

EVAL_STEPS = 64  # lazy cache updates are evaluated at least every EVAL_STEPS steps


@dataclass(slots=True)
class JoiningRow:
    """A row that joins the decode batch: a complete prompt with its first token, which has been published."""

    row: Row
    """The row's request."""
    cache: SequenceCache
    """The prompt's cache."""
    next_position: int
    """Logical position of the first token."""
    token_id: int
    """The first token."""
    head_caches: Sequence[SequenceCache] = ()
    """The cache of each model that drafts."""
    hidden: mx.array | None = None
    """Last hidden state [1, 1, hidden] of the prompt; None without a head."""
    moves: bool = False
    """Whether only this row uses the caches, so that each layer may be freed once it is copied."""
    drafts: Sequence[Drafts] = ()
    """The ways to draft for the row."""


class DecodeGroup:
    """Rows with one cache. When `join` raises, nothing has changed; when `select` raises, the rows are lost."""

    def __init__(
        self,
        language_model: LanguageModel,
        heads: DraftingModels | None,
        vocab_size: int,
        first: JoiningRow,
        compiled: CompiledForward | None = None,
    ):
        self._language_model = language_model
        self._compiled = compiled
        self._heads = heads
        self._vocab_size = vocab_size
        self.rows = [_row(first)]
        self._cache = BatchCache.of(first.cache, as_offset=not language_model.explicit_positions)
        self._drafters = self._drafters_of(first)
        self._sampling = _sampling([first], vocab_size)
        self._lengths = mx.array([self.rows[0].length], mx.int32)
        self._newest = mx.array([first.token_id], mx.int32)
        self._launched: PendingStep | None = None
        self._steps = 0
        self._rows_changed()
        mx.eval(self._cache.state)  # pending work of the new row must not delay a step of all rows

    def _drafters_of(self, new: JoiningRow) -> Drafters | None:
        if self._heads is None or not new.head_caches or new.hidden is None:
            return None
        return Drafters.of(self._heads, new.head_caches, new.token_id, new.hidden, self._cache)

    def _rows_changed(self) -> None:
        """Rebuild everything that depends only on the rows' requests."""
        self._acceptance = Acceptance([one.row for one in self.rows])
        self._offsets = mx.array([row.offset for row in self.rows], mx.int32)
        self._output_offsets = mx.array([row.output_offset for row in self.rows], mx.int32)

    def join(self, new: Sequence[JoiningRow]) -> None:
        """Add rows, all at once because each join rewrites all rows of the group."""
        sampling = self._sampling.joined(_sampling(new, self._vocab_size))
        rows = [_row(one) for one in new]
        lengths = mx.concatenate([self._lengths, mx.array([row.length for row in rows], mx.int32)])
        newest = mx.concatenate([self._newest, mx.array([one.token_id for one in new], mx.int32)])
        self._cache.join([one.cache for one in new], all(one.moves for one in new))
        try:
            self._drafters_joined(new)
        except Exception:
            self._cache.select(list(range(len(self.rows))), self._cache.num_slots)
            if self._drafters is not None and not self._drafters.have(len(self.rows)):
                self._drafters = None
            raise
        self._sampling, self._lengths, self._newest = sampling, lengths, newest
        self.rows = [*self.rows, *rows]
        self._rows_changed()

    def _drafters_joined(self, new: Sequence[JoiningRow]) -> None:
        caches = [one.head_caches for one in new if one.head_caches]
        hidden = [one.hidden for one in new if one.hidden is not None]
        if self._drafters is not None and len(caches) == len(hidden) == len(new):
            self._drafters.join(caches, [one.token_id for one in new], hidden, all(one.moves for one in new))
        else:
            self._drafters = None

    def fill(self, index: int, segments: Sequence[DeviceSegment]) -> None:
        """Copy KV segments lent to the row at `index` back; the row stays."""
        layers = [*self._cache.layers, *([] if self._drafters is None else self._drafters.layers)]
        num_layers = sum(map(appends, layers))
        if num_layers == len(segments[0].ends):  # the drafters' layers may have been dropped
            fill(segments, layers, index)

    def remove(self, stay: list[int], lent: Mapping[int, Sequence[DeviceSegment]]) -> None:
        """Remove all rows but those at the indices `stay`.

        Args:
            stay: Indices of the rows to keep.
            lent: KV segments to copy back, by index of the removed row.
        """
        calls = [LentSegments(segments, index).fill for index, segments in lent.items()]
        if stay:
            self.select(stay, calls)
            return
        self._cache.select([], 0, calls)
        if self._drafters is not None:
            self._drafters.select([], 0, calls)

    def select(self, stay: list[int], leaving: Sequence[Callable[[Any], None]] = ()) -> None:
        """Keep only the rows at these indices. leaving: see BatchCache.select."""
        rows = [self.rows[i] for i in stay]
        num_slots = max(row.length for row in rows) + self._num_in_flight + 1
        sampling = self._sampling.select(stay)
        index = mx.array(stay, mx.int32)
        lengths, newest = self._lengths[index], self._newest[index]
        self._cache.select(stay, num_slots, leaving)
        if self._drafters is not None:
            self._drafters.select(stay, num_slots, leaving)
        self._sampling, self._lengths, self._newest = sampling, lengths, newest
        for row in self.rows:
            row.is_removed = row not in rows
        self.rows = rows
        self._rows_changed()

    def start_step(self, drafts: Drafts) -> "PendingStep":
        """Launch the next forward; return the step before it, which is to be read."""
        if self._launched is None or all(row.is_removed for row in self._launched.rows):
            self._launched = None
            self._launched = self._launch(drafts)
        before = self._launched
        self._launched = self._launch(drafts)
        return before

    def finish_step(self, before: "PendingStep") -> dict[str, RowOutput]:
        """Return the new tokens of every row that is still in the group."""
        outputs = before.read()
        return {one.row.id: outputs[one.row.id] for one in before.rows if not one.is_removed}

    def pending(self) -> dict[str, RowOutput]:
        """Wait for the launched step and return its outputs by row id; `finish_step` returns them again."""
        return {} if self._launched is None else self._launched.read()

    def snapshot(self, index: int, parent: DeviceSegment | None, lend: bool = False) -> RowSnapshot | None:
        """Take a snapshot of one row, with the step in flight; see ModelRunner.snapshot_row. Waits for the device.

        The step is not read as `finish_step` does: the matchers of removed rows must not consume its tokens.
        """
        row = self.rows[index]
        new = self._in_flight_ids(row)
        length, taken_in = row.length + len(new), [*row.output_ids, *new][:-1]
        is_sound = row.row.spec.sparse is None and NO_TOKEN not in taken_in
        if not is_sound or (self._heads is not None and self._drafters is None):
            return None
        cache, hidden = self._cache.row(index, length), None
        num_lent = sum(map(appends, cache)) if lend else 0
        if self._drafters is not None:
            head_layers, hidden = self._drafters.row(index, length)
            cache += head_layers
        if not is_finite(cache):
            return None
        snapshot = take(cache, hidden, length, parent, num_lent)
        return RowSnapshot(np.array(taken_in, np.int32), snapshot)

    def snapshot_prompt(
        self, index: int, num_tokens: int, parent: DeviceSegment | None, lend: bool = False
    ) -> StateSnapshot | None:
        """Take a snapshot of the first tokens of one row's prompt; see ModelRunner.snapshot. Waits for the device."""
        cache = self._cache.row(index, num_tokens)
        if not is_finite(cache):
            return None
        return take(cache, None, num_tokens, parent, num_lent=len(cache) if lend else 0)

    def _in_flight_ids(self, row: DecodingRow) -> tuple[int, ...]:
        """Return the row's tokens from a launched step that has not been read."""
        launched = self._launched
        if launched is None or launched.outputs is not None or row not in launched.rows:
            return ()
        return launched.token_ids()[launched.rows.index(row)]

    @property
    def num_bytes(self) -> int:
        return self._cache.nbytes + (self._drafters.nbytes if self._drafters is not None else 0)

    @property
    def _num_in_flight(self) -> int:
        """The most tokens that a launched, unread step can add to a row."""
        return (
            0 if self._launched is None or self._launched.outputs is not None else self._launched.drafts.num_tokens + 1
        )

    def _launch(self, drafts: Drafts) -> PendingStep:
        has_drafts = self._has_drafts(drafts)
        drafts = drafts if any(has_drafts) else PLAIN
        num_drafts = drafts.num_tokens
        longest = max(row.length for row in self.rows) + self._num_in_flight
        first_position = self._lengths + self._output_offsets + 1
        positions = first_position[:, None] + mx.arange(num_drafts + 1)
        noise = self._sampling.noise(positions)
        tokens = self._newest[:, None]
        by_model = num_drafts > 0 and self._is_by_model(drafts)
        if num_drafts and not by_model:
            tokens = mx.concatenate([tokens, self._row_drafts(drafts)], axis=1)
        elif num_drafts:
            tokens = mx.concatenate([tokens, self._draft(drafts, positions, noise, longest)], axis=1)
        logits, hidden = self._forward(tokens, longest)
        sampled = self._sampling.sample(logits, tokens, positions, noise, self._failed_rows)
        for i, error in sampled.errors.items():
            self.rows[i].error = error
        num_accepted = num_kept = None
        if num_drafts:
            num_accepted, num_kept = self._acceptance.count(tokens, sampled.tokens, positions)
            if not all(has_drafts):
                num_kept = mx.where(mx.array(has_drafts), num_kept, 1)
        self._commit(sampled.tokens, hidden, num_kept, longest, drafts.proposer if by_model else None)
        rows = list(self.rows)
        results = sampled.tokens, num_kept, num_accepted, sampled.logprobs
        return self._start(PendingStep(rows, drafts, has_drafts, *results))

    def _has_drafts(self, drafts: Drafts) -> list[bool]:
        """Return which rows can be given these drafts. With those of a TextProposer it reads the step before."""
        if not drafts.num_tokens:
            return [False] * len(self.rows)
        if self._is_by_model(drafts):
            return [self._drafters is not None] * len(self.rows)
        if self._launched is not None:
            self._launched.read()
        own = [row.drafts.get(drafts.proposer) for row in self.rows]
        return [one is not None and (drafts.is_forced or one.has_drafts) for one in own]

    def _is_by_model(self, drafts: Drafts) -> bool:
        """Return whether a model makes these drafts, and not a TextProposer."""
        return self._heads is not None and drafts.proposer in self._heads.by_name

    def _row_drafts(self, drafts: Drafts) -> mx.array:
        """Return the drafts of a TextProposer, int32 [B, drafts.num_tokens]; arbitrary tokens where it has none."""
        own = [row.drafts.get(drafts.proposer) for row in self.rows]
        rows = [[0] * drafts.num_tokens if one is None else one.drafts(drafts.num_tokens) for one in own]
        found = np.array(rows, np.int32)  # prompts may have tokens without a logit
        return mx.array(np.where(found < self._vocab_size, found, 0), mx.int32)

    def _draft(self, drafts: Drafts, positions: mx.array, noise: mx.array | None, longest: int) -> mx.array:
        assert self._drafters is not None and self._heads is not None
        head, drafter = self._heads.by_name[drafts.proposer], self._drafters.by_name[drafts.proposer]

        def choose(hidden: mx.array, i: int) -> mx.array:
            end = i + hidden.shape[1]
            own = None if noise is None else noise[:, i:end]
            logits = head.logits(hidden)
            return self._sampling.draft(logits, self._newest[:, None], positions[:, i:end], own)

        return drafter.draft(drafts.num_tokens, self._lengths, longest, choose)

    def _failed_rows(self) -> list[int]:
        """Let matchers consume the previous step's tokens; return the indices of rows whose matchers have failed."""
        if self._launched is not None:
            self._launched.read()
        return [i for i, row in enumerate(self.rows) if row.error is not None]

    def _forward(self, tokens: mx.array, longest: int) -> tuple[mx.array, mx.array | None]:
        num_new = tokens.shape[1]
        positions = (self._lengths + self._offsets)[:, None] + mx.arange(num_new)
        if self._compiled is not None:
            extent = longest + num_new
            return self._compiled(tokens, self._cache, self._lengths, extent, positions, num_new > 1)
        uniform = self._uniform_length()  # without a mask attention sees the whole extent, which must be exact then
        extent = (longest if uniform is None else uniform) + num_new
        cache = self._cache.at(self._lengths, extent, uniform, record=num_new > 1)
        return self._language_model.decode(tokens, cache, positions)

    def _uniform_length(self) -> int | None:
        """Return the number of cached tokens if the host knows that it is the same for all rows, else None."""
        if self._launched is not None and self._launched.outputs is None:
            if self._launched.drafts.num_tokens:
                return None
            behind = {id(row) for row in self._launched.rows}
            lengths = {row.length + (id(row) in behind) for row in self.rows}
        else:
            lengths = {row.length for row in self.rows}
        return lengths.pop() if len(lengths) == 1 else None

    def _commit(
        self, sampled: mx.array, hidden: mx.array | None, num_kept: mx.array | None, longest: int, drafted: str | None
    ) -> None:
        """Update the rows' state on the device with the kept tokens.

        Args:
            sampled: int32 [B, k + 1], the samples.
            hidden: [B, k + 1, hidden]; None if the model returns none.
            num_kept: int32 [B], how many of the samples each row keeps; None for the only one.
            longest: At least the rows' most cached tokens before the step.
            drafted: See Drafters.add.
        """
        kept = mx.ones_like(self._lengths) if num_kept is None else num_kept
        before, self._lengths = self._lengths, self._lengths + kept
        self._sampling.commit(sampled, kept)
        if num_kept is None:
            self._newest = sampled[:, 0]
        else:
            self._cache.commit(num_kept)
            self._newest = mx.take_along_axis(sampled, (num_kept - 1)[:, None], axis=1)[:, 0]
        read = None if self._heads is None else self._heads.read(hidden, sampled)
        if self._drafters is not None and read is not None:
            extent = longest + sampled.shape[1]
            self._drafters.add(mx.maximum(sampled, 0), read, kept, drafted, before, extent)

    def _start(self, launched: PendingStep) -> PendingStep:
        arrays = [launched.tokens, self._newest, self._lengths, *self._sampling.state]
        if launched.num_kept is not None:
            arrays.append(launched.num_kept)
        if launched.num_accepted is not None:
            arrays.append(launched.num_accepted)
        if launched.logprobs is not None:
            arrays.extend(launched.logprobs.arrays)
        if self._drafters is not None:
            arrays.extend(self._drafters.pending_state)
        mx.async_eval(arrays)
        self._steps += 1
        if self._steps % EVAL_STEPS == 0:
            mx.eval(self._cache.state, [] if self._drafters is None else self._drafters.state)
        return launched


def _row(new: JoiningRow) -> DecodingRow:
    length = new.row.num_tokens
    row = DecodingRow(new.row, length, new.next_position - length, [*new.row.output_token_ids, new.token_id])
    row.drafts = row_drafts(new.drafts, np.append(new.row.prompt_token_ids, new.token_id))
    return row


def _sampling(new: Sequence[JoiningRow], vocab_size: int) -> SamplingBatch:
    sampling = SamplingBatch.of([one.row for one in new], vocab_size)
    sampling.commit(mx.array([[one.token_id] for one in new], mx.int32), mx.ones(len(new), mx.int32))
    return sampling
