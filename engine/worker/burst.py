"""Computes chunks of several prompts in one forward.

Chunks are padded on the right. Attention does not see the padding, which comes after every token of its row and is not
kept. Recurrent layers skip it, where the family can: at padded positions a state neither decays nor changes, and the
convolution's window ends with the row's own last token. Otherwise prompts share forwards in which all of them have the
same number of tokens. Each prompt gets the caches that it would get alone.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from engine.worker import run_ahead
from engine.worker.burst_layer import BurstForward
from engine.worker.drafting_models import DraftingModels
from engine.worker.kv_cache import SequenceCache
from engine.worker.language_model import LanguageModel
from engine.worker.layer_kinds import is_recurrent, kind_of
from engine.worker.prefill import PromptState, waits
from engine.worker.rewind import has_recurrent_layers

EQUAL_LENGTHS = "of equal lengths: its recurrent layers do not skip padding"
"""Status of a family whose prompts of unlike lengths share several forwards, of equal lengths each."""

PADDING_IDS = (0, 1, 7, 100)
"""Tokens with which `skips_padding` pads: some vocabularies have equal embeddings for unused tokens."""

MORE_PADDING = 60
"""Further padding with which `skips_padding` finds states that decay by the same factor for every padding token."""

ROUNDING = 0.05
"""Share of a state's largest value by which padding may change it."""


class BurstPrefill:
    """Advances several prompts in one forward. Requires `LanguageModel.selects_positions`."""

    def __init__(self, language_model: LanguageModel, heads: DraftingModels | None):
        self._language_model = language_model
        self._heads = heads

    @cached_property
    def skips_padding(self) -> bool:
        """Whether padding tokens leave recurrent states as they are; computes a few short forwards.

        The states must be the same bit by bit for other padding, and but for rounding for more of it, which other
        kernels may compute. Rounding of low precision grows with the layers (in bfloat16 to 0.18 of a state in 32
        layers, and to all of it in 40 layers with experts, which rounding chooses), so there the first recurrent layer
        decides.
        """
        if not has_recurrent_layers(self._language_model):
            return True
        first, *others = [self._padded_states(padding_id) for padding_id in PADDING_IDS]
        if not all(mx.array_equal(*pair).item() for other in others for pair in zip(first, other, strict=True)):
            return False
        return self._differ_by_rounding(first, self._padded_states(PADDING_IDS[0], MORE_PADDING))

    @cached_property
    def begins_with_zeros(self) -> bool:
        """Whether recurrent layers begin a prompt as if its states were zeros; computes two short forwards.

        RecurrentGemma does not normalize the input of a prompt's first token, but that of any token behind a state.
        """
        if not has_recurrent_layers(self._language_model):
            return True
        begun = self._states_of_a_token(None)
        return self._differ_by_rounding(begun, self._states_of_a_token([mx.zeros_like(state) for state in begun]))

    def _states_of_a_token(self, states: Sequence[mx.array] | None) -> list[mx.array]:
        """Return the recurrent states after one token behind the given ones, None for those of a new prompt."""
        caches = self._language_model.make_cache()
        recurrent: list[Any] = [layer for layer in caches if is_recurrent(layer)]
        if states is not None:
            left = iter(states)
            for layer in recurrent:
                layer.cache = [next(left) for _ in layer.cache]
        positions = np.zeros((3, 1, 1), np.int32)
        self._language_model.extend(mx.array([[3]]), None, self._layers([caches], [1]), positions, launch=False)
        return [slot for layer in recurrent for slot in layer.cache]

    def _differ_by_rounding(self, states: Sequence[mx.array], others: Sequence[mx.array]) -> bool:
        """Return whether recurrent states differ by no more than rounding: of which layers says `skips_padding`."""
        first = next(layer for layer in self._language_model.make_cache() if is_recurrent(layer))
        is_exact = all(state.dtype == mx.float32 for state in states)
        num_compared = len(states) if is_exact else len(first.cache)
        pairs = zip(states[:num_compared], others[:num_compared], strict=True)
        return all(_nearly_equal(*pair) for pair in pairs)

    def _padded_states(self, padding_id: int, num_more: int = 0) -> list[mx.array]:
        """Return the recurrent states after two padded forwards, the second of which continues the first."""
        caches = [self._language_model.make_cache() for _ in range(2)]
        for start, lengths in ((0, [1, 3]), (1, [2, 1])):
            layers = self._layers(caches, lengths)
            token_ids = _padded([np.full(length, 3) for length in lengths], padding_id)
            token_ids = np.pad(token_ids, ((0, 0), (0, num_more)), constant_values=padding_id)
            positions = np.broadcast_to(np.arange(start, start + token_ids.shape[1]), (3, *token_ids.shape))
            self._language_model.extend(mx.array(token_ids), None, layers, positions, launch=False)
        recurrent: list[Any] = [layer for cache in caches for layer in cache if is_recurrent(layer)]
        return [slot for layer in recurrent for slot in layer.cache]

    def advance(self, prompts: Sequence[PromptState], lengths: Sequence[int], padding_id: int = 0) -> mx.array | None:
        """Compute the next tokens of each prompt in one forward, evaluated. If it raises, all of the prompts are lost.

        Where recurrent layers do not skip padding, it is one forward per distinct length, and where they do not begin
        with zeros, prompts that begin are computed apart from those that continue.

        Args:
            prompts: Prompts of text only.
            lengths: Tokens of each to compute, at least 1.
            padding_id: Token at padded positions; it has no effect.

        Returns:
            Logits [E, 1, vocab] of the last token of each of the E complete prompts; None without one.
        """
        has_begun = [prompt.done > 0 and not self.begins_with_zeros for prompt in prompts]
        logits: dict[int, mx.array] = {}
        for begun in sorted(set(has_begun)):
            group = [i for i, each in enumerate(has_begun) if each == begun]
            done = 0
            longest = max(lengths[i] for i in group)
            for end in [longest] if self.skips_padding else sorted({lengths[i] for i in group}):
                rows = [i for i in group if lengths[i] > done]
                own = [min(lengths[i], end) - done for i in rows]
                found = self._forward([prompts[i] for i in rows], own, padding_id)
                logits |= {i: each for i, each in zip(rows, found, strict=True) if each is not None}
                done = end
        return mx.concatenate([logits[i] for i in sorted(logits)]) if logits else None

    def _forward(
        self, prompts: Sequence[PromptState], lengths: Sequence[int], padding_id: int
    ) -> list[mx.array | None]:
        """Compute one forward, evaluated; return each prompt's logits [1, 1, vocab], None for one not complete."""
        starts = [prompt.done for prompt in prompts]
        for prompt, length in zip(prompts, lengths, strict=True):
            prompt.done += length
        spans = list(zip(prompts, starts, strict=True))
        token_ids = mx.array(_padded([prompt.token_ids[start : prompt.done] for prompt, start in spans], padding_id))
        positions = np.stack(
            [_padded([prompt.positions[axis, 0, start : prompt.done] for prompt, start in spans]) for axis in range(3)]
        )
        layers = self._layers([prompt.cache for prompt in prompts], lengths)
        complete = [i for i, prompt in enumerate(prompts) if prompt.done == len(prompt.token_ids)]
        logits = None
        with run_ahead.of_several_prompts():
            if complete:
                rows, last = mx.array(complete, mx.int32), mx.array([lengths[i] - 1 for i in complete], mx.int32)
                logits, hidden = self._language_model.extend_to_end(
                    token_ids, None, layers, positions, lambda hidden: hidden[rows, last][:, None]
                )
            else:
                hidden = self._language_model.extend(token_ids, None, layers, positions, launch=False)
        if self._heads is not None and (read := self._heads.read(hidden, token_ids)) is not None:
            self._prime(self._heads, prompts, starts, read)
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                if waits(self._heads, prompt):
                    prompt.hidden = mx.contiguous(read[i : i + 1, length - 1 : length])
        waiting = [prompt.hidden for prompt in prompts if prompt.hidden is not None]
        mx.eval([layer.state for prompt in prompts for layer in prompt.layers], waiting, logits)
        at = {i: n for n, i in enumerate(complete)}
        return [logits[at[i] : at[i] + 1] if logits is not None and i in at else None for i in range(len(prompts))]

    def _prime(
        self, heads: DraftingModels, prompts: Sequence[PromptState], starts: Sequence[int], hidden: mx.array
    ) -> None:
        """Let heads read the new hidden states of each prompt; see Prefill._prime."""
        starts = [start - (prompt.hidden is not None) for prompt, start in zip(prompts, starts, strict=True)]
        spans = list(zip(prompts, starts, strict=True))
        lengths = [prompt.done - 1 - start for prompt, start in spans]
        if not any(lengths) or not any(prompts[0].head_caches):
            return
        none = mx.zeros((1, 1, hidden.shape[2]), hidden.dtype)
        waiting = mx.concatenate([none if prompt.hidden is None else prompt.hidden for prompt in prompts])
        skipped = mx.array([[prompt.hidden is None] for prompt in prompts], mx.int32)
        at = mx.minimum(skipped + mx.arange(max(lengths)), hidden.shape[1])
        before = mx.take_along_axis(mx.concatenate([waiting, hidden], axis=1), at[..., None], axis=1)
        behind = mx.array(_padded([prompt.successors[start : prompt.done - 1] for prompt, start in spans]))
        for i, (head, own) in enumerate(zip(heads.models, heads.split(before), strict=True)):
            caches = [prompt.head_caches[i] for prompt in prompts]
            if caches[0]:
                first = mx.array([cache[0].offset for cache in caches], mx.int32)
                layers = _layers(caches, lengths, head.as_offset)
                head(behind, own, layers, first[:, None] + mx.arange(max(lengths)))

    def _layers(self, caches: Sequence[SequenceCache], lengths: Sequence[int]) -> list[Any]:
        return _layers(caches, lengths, as_offset=not self._language_model.explicit_positions)


def _nearly_equal(one: mx.array, other: mx.array) -> bool:
    """Return whether two states differ by at most ROUNDING."""
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    return bool((mx.abs(one - other).max() <= ROUNDING * mx.abs(one).max()).item())


def _layers(caches: Sequence[SequenceCache], lengths: Sequence[int], as_offset: bool) -> list[Any]:
    """Combine the prompts' caches, layer by layer. as_offset: see Cursor."""
    forward = BurstForward(lengths, as_offset)
    return [kind_of(rows[0]).burst_layer(rows, forward) for rows in zip(*caches, strict=True)]


def _padded(rows: Sequence[np.ndarray], padding: int = 0) -> np.ndarray:
    """Return the rows as int32 [B, longest], padded on the right."""
    padded = np.full((len(rows), max(map(len, rows))), padding, np.int32)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded
