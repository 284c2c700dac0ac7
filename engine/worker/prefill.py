"""Computes prompts into caches, chunk by chunk: text by token ids, images by features, with explicit positions.

A prompt with a sparse plan consists only of the plan's tokens here, at their positions in the whole prompt. Attention
sees the original distances; recurrent layers continue as if no token were missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engine.core.row import Row
from engine.core.runner import ImageLeft, RowOutput
from engine.errors import InvalidRequest
from engine.protocol import ImagePatches
from engine.worker.drafting_models import DraftingModels
from engine.worker.image_chunk import ImageChunk
from engine.worker.kv_cache import SequenceCache, num_bytes
from engine.worker.kv_layer import slots_like
from engine.worker.language_model import LanguageModel
from engine.worker.layer_kinds import appends, kind_of
from engine.worker.pooling import PooledStates
from engine.worker.prompt_logprobs import LOGPROBS_CHUNK_TOKENS, PromptLogprobs
from engine.worker.sampling_batch import SamplingBatch
from engine.worker.snapshot import (
    DeviceSegment,
    KeysValues,
    StateSnapshot,
    is_finite,
    prefix,
    restore,
    take,
)
from engine.worker.vision import ImageEncoding, VisionEncoder


@dataclass(slots=True)
class PromptState:
    """The state of a prompt in progress. L: its tokens without those that a sparse plan skips."""

    token_ids: np.ndarray
    """int32 [L], the tokens to compute."""
    successors: np.ndarray
    """int32 [L], the token after each of them in the whole prompt, computed or not; 0 for the last."""
    cache: SequenceCache
    """The target's cache."""
    positions: np.ndarray
    """int32 [3, 1, L]: time, height, width."""
    next_position: int
    """Logical position of the first generated token."""
    image_index: np.ndarray
    """int32 [n], indices of the image tokens among token_ids."""
    head_caches: list[SequenceCache] = field(default_factory=list)
    """The cache of each model that drafts."""
    hidden: mx.array | None = None
    """Last hidden state [1, 1, hidden], which no head has read yet; None without a head, see `waits`."""
    features: list[mx.array] = field(default_factory=list)
    """Features of the images encoded so far."""
    all_features: mx.array | None = None
    """[n - num_image_tokens_restored, ...], once all images are encoded, see VisionTower.finish."""
    num_images_restored: int = 0
    """Images before the restored boundary, which need no features."""
    num_image_tokens_restored: int = 0
    """Image tokens before the restored boundary."""
    done: int = 0
    """Tokens computed so far."""
    num_whole: int = 0
    """Tokens at its beginning that see each other, see ModelRunner.whole_prompts; those after them are an answer's."""
    pooled: PooledStates | None = None
    """Set for a request with `pooling`."""
    logprobs: PromptLogprobs | None = None
    """Set for a request with `prompt_logprobs` that has said nothing yet."""
    encoding: ImageEncoding | None = None
    """The image being encoded."""

    @property
    def layers(self) -> SequenceCache:
        """Layers of the target's cache, then of those of the models that draft."""
        return [*self.cache, *(layer for cache in self.head_caches for layer in cache)]

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.layers)


class Prefill:
    """Begins and advances prompts.

    Args:
        language_model: The language model.
        heads: The models that draft, None without one.
        vision: The vision encoder, None for a text model.
        image_token_id: The placeholder of images.
        whole_prompts: Whether the tokens of a prompt see each other, see ModelRunner.whole_prompts.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        heads: DraftingModels | None,
        vision: VisionEncoder | None,
        image_token_id: int | None,
        whole_prompts: bool = False,
    ):
        self._language_model = language_model
        self._heads = heads
        self._vision = vision
        self.image_token_id = image_token_id
        self.both_ways = frozenset() if vision is None else vision.both_ways
        self._whole_prompts = whole_prompts
        self._adds_features = vision is not None and vision.adds_features
        self._slots_like: list[KeysValues] = []  # one token's keys and values per attention layer, once known

    def begin(self, request: Row) -> PromptState:
        """Begin a prompt with empty caches. Raises InvalidRequest if its tokens and images do not match."""
        ids, images = request.prompt_token_ids, request.spec.images
        index, positions, next_position = np.empty(0, np.int32), np.arange(len(ids), dtype=np.int32), len(ids)
        if images:
            index = self._image_index(request.spec.token_ids, images)
            positions, next_position = self._positions(request.spec.token_ids, images)
            said = next_position + np.arange(len(request.output_token_ids), dtype=np.int32)
            behind = np.broadcast_to(said, (*positions.shape[:-1], len(said)))
            positions = np.concatenate([positions, behind], axis=-1)
            next_position += len(said)
        positions = np.broadcast_to(positions, (3, 1, len(ids)))
        successors = np.append(ids[1:], 0)
        if (computed := request.computed_positions) is not None:
            _check_images(index, computed)
            ids, successors, positions = ids[computed], successors[computed], positions[..., computed]
            index = np.searchsorted(computed, index).astype(np.int32)
        cache = self._language_model.make_cache()
        head_caches = [] if self._heads is None else self._heads.make_caches()
        prompt = PromptState(ids, successors, cache, positions, next_position, index, head_caches)
        self._make_room(prompt.layers, len(ids))
        if self._heads is not None:
            self._heads.begin(int(request.prompt_token_ids[0]), head_caches)
        prompt.num_whole = len(request.spec.token_ids) if self._whole_prompts else 0
        prompt.pooled = None if request.spec.pooling is None else PooledStates(request.spec.pooling)
        if request.spec.prompt_logprobs is not None and not request.output_token_ids:
            prompt.logprobs = PromptLogprobs(request.spec.prompt_logprobs)
        return prompt

    def learn_slots(self, snapshot: StateSnapshot) -> None:
        """Allocate all slots of later prompts at once: the library's caches grow by copying."""
        self._slots_like = [(keys[..., :1, :], values[..., :1, :]) for keys, values in snapshot.segment.keys_values]

    def _make_room(self, cache: SequenceCache, num_tokens: int) -> None:
        attention = filter(appends, cache)
        for layer, (keys, values) in zip(attention, self._slots_like, strict=bool(self._slots_like)):
            slots = kind_of(layer).num_slots(layer, num_tokens)
            layer.keys, layer.values = slots_like(keys, slots), slots_like(values, slots)

    def restore(
        self,
        prompt: PromptState,
        snapshot: StateSnapshot,
        images: tuple[ImagePatches, ...],
        lend: Sequence[DeviceSegment] = (),
    ) -> None:
        """Restore a snapshot into a prompt that has just begun. lend: see snapshot.restore."""
        done = snapshot.num_tokens
        assert prompt.done == 0 and done < len(prompt.token_ids)
        restore(snapshot, prompt.layers, len(prompt.token_ids), lend)
        prompt.done, prompt.hidden = done, snapshot.hidden
        num_tokens = prompt.num_image_tokens_restored = int(np.searchsorted(prompt.image_index, done))
        for image in images:
            num_tokens -= image.num_tokens
            if num_tokens < 0:
                break
            prompt.num_images_restored += 1

    def snapshot(
        self, prompt: PromptState, parent: DeviceSegment | None, lend: bool = False, num_tokens: int | None = None
    ) -> StateSnapshot | None:
        """Take a snapshot of a prompt between two chunks; None if its state is not finite.

        Args:
            prompt: The prompt.
            parent: The KV segment of a snapshot of a shorter prefix; None without one.
            lend: Leave the new keys and values in the prompt's cache.
            num_tokens: See ModelRunner.snapshot.
        """
        layers, num_tokens = prompt.layers, prompt.done if num_tokens is None else num_tokens
        if num_tokens < prompt.done:
            layers = prefix(layers, num_tokens)
        if not is_finite(layers):
            return None
        num_lent = sum(map(appends, layers)) if lend else 0
        return take(layers, prompt.hidden, num_tokens, parent, num_lent=num_lent)

    def _image_index(self, ids: np.ndarray, images: tuple[ImagePatches, ...]) -> np.ndarray:
        if self._vision is None:
            raise InvalidRequest("this model does not support images", "messages")
        index = np.flatnonzero(ids == self.image_token_id).astype(np.int32)
        expected = sum(image.num_tokens for image in images)
        if len(index) != expected:
            raise InvalidRequest(f"the prompt has {len(index)} image tokens, its images have {expected}", "messages")
        return index

    def next_image(self, prompt: PromptState, images: tuple[ImagePatches, ...]) -> ImageLeft | None:
        """Return the next image of the prompt to encode; None when there is none left."""
        while (index := prompt.num_images_restored + len(prompt.features)) < len(images):
            assert self._vision is not None
            encoding = prompt.encoding = prompt.encoding or self._vision.begin(images[index])
            if encoding.features is None:
                depth = self._vision.num_blocks
                return ImageLeft(len(images[index].patches), depth - encoding.num_done, depth)
            prompt.features.append(encoding.features)
            prompt.encoding = None
        if prompt.features and prompt.all_features is None:
            prompt.all_features = mx.concatenate(prompt.features)
        return None

    def encode(self, prompt: PromptState, num_blocks: int) -> None:
        """Compute the next `num_blocks` blocks of the image that `next_image` returned."""
        assert self._vision is not None and prompt.encoding is not None
        self._vision.advance(prompt.encoding, num_blocks)

    def advance(self, prompt: PromptState, max_tokens: int) -> tuple[int, mx.array | None]:
        """Compute the next chunk. Return its size, and after the last chunk the logits [1, 1, vocab], else None."""
        start = prompt.done
        most = max_tokens if prompt.logprobs is None else min(max_tokens, LOGPROBS_CHUNK_TOKENS)
        end = min(start + most, len(prompt.token_ids))
        token_ids = mx.array(prompt.token_ids[None, start:end].astype(np.int32))
        embeds = self._embed(prompt, token_ids)
        positions = prompt.positions[..., start:end]
        prompt.done = end
        logits = None
        if prompt.logprobs is not None:
            every, hidden = self._language_model.extend_with_logits(token_ids, prompt.cache, positions)
            behind = mx.array(prompt.successors[None, start : min(end, len(prompt.token_ids) - 1)].astype(np.int32))
            prompt.logprobs.add(every[:, : behind.shape[1]], behind)
            logits = every[:, -1:] if end == len(prompt.token_ids) else None
        elif end < len(prompt.token_ids):
            hidden = self._language_model.extend(token_ids, embeds, prompt.cache, positions)
        else:
            logits, hidden = self._language_model.extend_to_end(token_ids, embeds, prompt.cache, positions)
        read = None if self._heads is None else self._heads.read(hidden, token_ids)
        if self._heads is not None and read is not None:
            self._prime(self._heads, prompt, read)
        if logits is None:  # wait once per chunk, so that the cost model can measure it
            mx.eval([layer.state for layer in prompt.layers], [] if prompt.hidden is None else prompt.hidden)
        return end - start, logits

    def pool(self, prompt: PromptState, pooled: PooledStates, max_tokens: int) -> tuple[int, bool]:
        """Compute the next chunk of a prompt with `pooling`. Return its size, and whether it is the last."""
        start = prompt.done
        end = prompt.done = min(start + max_tokens, len(prompt.token_ids))
        token_ids = mx.array(prompt.token_ids[None, start:end].astype(np.int32))
        pooled.add(self._language_model.states(token_ids, prompt.cache, prompt.positions[..., start:end]))
        mx.eval([layer.state for layer in prompt.cache])
        return end - start, end == len(prompt.token_ids)

    def _prime(self, heads: DraftingModels, prompt: PromptState, hidden: mx.array) -> None:
        """Let heads read each new hidden state with the token after it; the newest state waits for its token.

        A head without a cache reads none of them.
        """
        if not waits(heads, prompt):
            return
        before, start = hidden[:, :-1], prompt.done - hidden.shape[1]
        if prompt.hidden is not None:
            before, start = mx.concatenate([prompt.hidden, before], axis=1), start - 1
        if before.shape[1] and any(prompt.head_caches):
            behind = prompt.successors[None, start : prompt.done - 1].astype(np.int32)
            heads.prime(mx.array(behind), before, prompt.head_caches)
        prompt.hidden = mx.contiguous(hidden[:, -1:])
        mx.async_eval(prompt.hidden)

    def _embed(self, prompt: PromptState, token_ids: mx.array) -> ImageChunk | None:
        """Embed the next chunk of a prompt, [1, L]; None for a chunk of text whose tokens see those before them."""
        start, end = prompt.done, prompt.done + token_ids.shape[1]
        first, last = np.searchsorted(prompt.image_index, (start, end))
        num_whole = max(min(prompt.num_whole, end) - start, 0)
        if first == last and not num_whole:
            return None
        embeds = self._language_model.embed_for_layers(token_ids)
        if first == last:
            return ImageChunk(embeds, np.empty(0, np.int32), mx.zeros((0, 0)), num_whole=num_whole)
        assert prompt.all_features is not None
        skipped, places = prompt.num_image_tokens_restored, prompt.image_index[first:last] - start
        features = prompt.all_features[int(first) - skipped : int(last) - skipped].astype(embeds.dtype)
        at, inputs = (0, mx.array(places)), features[:, : embeds.shape[-1]]
        embeds[at] = embeds[at] + inputs if self._adds_features else inputs
        is_inside = np.isin((end - 1, end), prompt.image_index).all()
        assert not (self.both_ways and is_inside), "the scheduler ends no chunk inside an image"
        per_layer = self._language_model.per_layer_inputs(token_ids, places)
        return ImageChunk(embeds, places, features[:, embeds.shape[-1] :], self.both_ways, per_layer, num_whole)

    def _positions(self, ids: np.ndarray, images: tuple[ImagePatches, ...]) -> tuple[np.ndarray, int]:
        if not self._language_model.explicit_positions:
            return np.arange(len(ids), dtype=np.int32), len(ids)
        grids = mx.array([image.grid_thw for image in images], mx.int32)
        positions, deltas = self._language_model.lm.get_rope_index(mx.array(ids[None].astype(np.int32)), grids)
        return np.array(positions, np.int32), len(ids) + int(np.array(deltas).reshape(-1)[0])


def _check_images(image_index: np.ndarray, computed: np.ndarray) -> None:
    num_missing = len(image_index) - int(np.isin(image_index, computed).sum())
    if num_missing:
        raise InvalidRequest(f"the prefill plan omits {num_missing} of {len(image_index)} image tokens", "messages")


def waits(heads: DraftingModels, prompt: PromptState) -> bool:
    """Return whether a prompt's newest hidden state waits for heads.

    A head that shares the target's keys and values reads only the state of a prompt's last token. Where there is no
    other, nothing but the caches is evaluated before it, so the target's layers behind its last own keys and values are
    not computed.
    """
    return heads.reads_prompts or prompt.done == len(prompt.token_ids)


def first_tokens(rows: Sequence[Row], logits: mx.array, vocab_size: int) -> list[RowOutput]:
    """Sample the first token of each of the rows, without advancing their matchers.

    Args:
        rows: The rows.
        logits: [1 or rows, 1, vocab], of each prompt's last position.
        vocab_size: Number of logits.
    """
    logits = mx.broadcast_to(logits, (len(rows), 1, logits.shape[-1]))
    positions = mx.array([[len(row.output_token_ids)] for row in rows], mx.int32)
    sampling = SamplingBatch.of(rows, vocab_size)
    sampled = sampling.sample(
        logits, positions, positions, sampling.noise(positions)
    )  # no drafts: tokens do not matter
    logprobs = {} if sampled.logprobs is None else sampled.logprobs.read([1] * len(rows))
    return [
        RowOutput((token_id,), logprobs.get(i, ()), error=sampled.errors.get(i))
        for i, token_id in enumerate(np.array(sampled.tokens)[:, 0].tolist())
    ]
