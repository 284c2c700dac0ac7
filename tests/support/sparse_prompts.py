"""Requests with sparse plans of every kind, and the truth about them: the model's own forward over what is kept."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from engine.core.spec_prefill.plan import ScoreRequest, fingerprint, make_plan
from engine.protocol import Boundary, EngineRequest, SparsePlan
from engine.worker.model_runner import MLXRunner
from engine.worker.sampler import Sampler
from tests.support.conversations import Answer, SharedSpecimens, Shelf, Stored, agree
from tests.support.schedules import Specimens

KINDS: dict[str, dict[str, Any]] = {
    "deep": {"layers": 4, "interval": 4, "agree": 0.3},
    "alternating": {"layers": 4, "interval": 2, "agree": 0.1, "seed": 1},
    "recurrent last": {"layers": 3, "interval": 2, "agree": 0.3, "seed": 6},
    "foreign head": {"layers": 2, "interval": 2, "seed": 3},
    "no head": {"layers": 2, "interval": 2, "tie": True, "mtp": False, "seed": 7},
}
"""Random models: with a head and without, layers in several orders."""


def with_plan(spec: EngineRequest, positions: Any, num_dense: int = 0) -> EngineRequest:
    """positions: ascending, the last token among them."""
    kept = np.array(positions, np.int32)
    return replace(spec, sparse=SparsePlan(kept, num_dense, fingerprint(spec.token_ids, kept, num_dense)))


def with_random_plan(rng: random.Random, spec: EngineRequest, image_token_id: int | None) -> EngineRequest:
    """Single tokens, chunks as a scorer chooses them, the last token alone, or all; pictures are always kept."""
    ids = spec.token_ids
    num_tokens, num_dense = len(ids), rng.choice([0, 0, rng.randrange(len(ids) + 1)])
    media = np.flatnonzero(ids == image_token_id)
    way = rng.randrange(6)
    if way < 2:
        anchors = np.union1d(media[media >= num_dense], []).astype(np.int32)
        importance = np.random.default_rng(rng.randrange(2**32)).random(num_tokens).astype(np.float32)
        return replace(spec, sparse=make_plan(ScoreRequest("", ids, num_dense, anchors, 0.1), importance))
    share = {2: 0.0, 5: 1.0}.get(way, rng.choice([0.1, 0.5, 0.9]))
    chosen = [place for place in range(num_tokens) if rng.random() < share]
    return with_plan(spec, sorted({*range(num_dense), *chosen, *media.tolist(), num_tokens - 1}), num_dense)


def gap(spec: EngineRequest) -> int:
    """Tokens in front of the first that is left out; nothing behind may be anyone's but this request's."""
    return len(spec.token_ids) if spec.sparse is None else spec.sparse.num_contiguous


def num_computed(spec: EngineRequest) -> int:
    return len(spec.token_ids if spec.sparse is None else spec.sparse.positions)


class Oracle:
    """mlx_vlm's language model over all that is kept and given out, in one forward: no cache, no chunks, no batch."""

    def __init__(self, runner: MLXRunner):
        self._lm = runner._model.module.language_model
        self._vision, self._image_token_id = runner._vision, runner.image_token_id

    def logits(self, spec: EngineRequest, output: list[int]) -> np.ndarray:
        """float64 [1 + len(output), vocab]: behind the prompt and each of these tokens of the answer."""
        kept = np.arange(len(spec.token_ids)) if spec.sparse is None else spec.sparse.positions
        grids = mx.array([image.grid_thw for image in spec.images], mx.int32) if spec.images else None
        prompt, _ = self._lm.get_rope_index(mx.array(spec.token_ids)[None], grids)
        after = prompt.max() + mx.arange(1, len(output) + 1)
        after = mx.broadcast_to(after, (*prompt.shape[:-1], len(output)))
        positions = mx.concatenate([prompt[..., mx.array(kept)], after], axis=-1)
        tokens = np.concatenate([spec.token_ids[kept], np.array(output, np.int32)])
        embeds = self._lm.model.embed_tokens(mx.array(tokens)[None])
        if spec.images:
            assert self._vision is not None
            features = mx.concatenate([self._vision.encode(image) for image in spec.images])
            embeds[0, mx.array(np.flatnonzero(spec.token_ids[kept] == self._image_token_id))] = features
        logits = self._lm(mx.array(tokens)[None], inputs_embeds=embeds, position_ids=positions).logits
        return np.array(logits[0, len(kept) - 1 :].astype(mx.float32)).astype(np.float64)

    def agrees(self, spec: EngineRequest, answer: Answer) -> None:
        """Each token is what stands behind those before it, by the request's penalties, temperature and seed."""
        p, tokens = spec.sampling, list(answer.token_ids)
        sampler = Sampler([replace(p, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)])
        for place, logits in enumerate(self.logits(spec, tokens[:-1])):
            shaped = logits.copy()
            for token in {*spec.token_ids.tolist(), *tokens[:place]}:
                shaped[token] *= 1 / p.repetition_penalty if shaped[token] > 0 else p.repetition_penalty
            for token, count in Counter(tokens[:place]).items():
                shaped[token] -= p.frequency_penalty * count + p.presence_penalty
            noise = sampler.noise(mx.array([[place]]), len(shaped))
            chosen = int(np.array(sampler(mx.array(shaped.astype(np.float32))[None, None], noise))[0, 0])
            assert tokens[place] == chosen, f"token {place} of {spec}"
            logprob = logits[chosen] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert agree(answer.logprobs[place].logprob, logprob), f"token {place} of {spec}"


class SparseSpecimens(Specimens):
    """Two of three have a plan."""

    def _spec(self, number: int) -> EngineRequest:
        spec, rng = super()._spec(number), random.Random(f"plan {number}")
        return with_random_plan(rng, spec, self.image_token_id) if rng.random() < 2 / 3 else spec


class SharedSparseSpecimens(SharedSpecimens):
    """Prompts that share parts, two of three with a plan: sparse and dense ones cross in the same prefixes."""

    def _spec(self, number: int) -> EngineRequest:
        spec, rng = super()._spec(number), random.Random(f"shared plan {number}")
        if rng.random() < 1 / 3:
            return spec
        spec = with_random_plan(rng, spec, self.image_token_id)
        assert spec.sparse is not None
        if rng.random() < 0.6:  # dense up to somewhere behind the root, most often up to a boundary exactly
            places = [b.num_tokens for b in spec.boundaries]
            end = rng.choice([*places, *places, rng.randrange(len(spec.token_ids) + 1)])
            return with_plan(spec, np.union1d(np.arange(end), spec.sparse.positions[spec.sparse.positions > end]), end)
        return spec


class SparseShelf(Shelf):
    """As a Shelf, but nothing behind a plan's first gap serves its prompt or is kept of it."""

    def serve(self, spec: EngineRequest) -> int:
        num_tokens, end = len(spec.token_ids), gap(spec)
        stored = (n for n in range(1, min(end, num_tokens - 1) + 1) if self.key(spec, n) in self.stored)
        served = point = max(stored, default=0)
        for boundary in [*spec.boundaries, Boundary("prompt", num_tokens - 1)]:
            kind, place = boundary.kind, boundary.num_tokens
            if kind not in self._kinds or place > end:
                continue
            if place >= point + self.min_tokens:
                self.stored.setdefault(self.key(spec, place), Stored(kind, place, spec))
                point = place
            if kind == "turn":
                point = max(point, place)
        return served
