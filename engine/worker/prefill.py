"""Prompts into caches, chunk by chunk: text by its ids, pictures by their features, positions explicit."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engine.core.request import Request
from engine.protocol import ImagePatches, InvalidRequest
from engine.worker.kv_cache import RowCache
from engine.worker.sampler import Sampler
from engine.worker.view import View
from engine.worker.vision import VisionEncoder


@dataclass(slots=True)
class Prompt:
    """A prompt in progress. positions: int32 [3, 1, L] (time, height, width). next_position: of the first answer token.

    image_index: int32 [n]: where in the prompt the image tokens are; all_features [n, hidden] go there, in order.
    features: of the pictures encoded so far.
    """

    token_ids: np.ndarray
    cache: RowCache
    positions: np.ndarray
    next_position: int
    image_index: np.ndarray
    features: list[mx.array] = field(default_factory=list)
    all_features: mx.array | None = None
    done: int = 0


class Prefill:
    """Makes and advances prompts. `vision` is None for a model that sees no images."""

    def __init__(self, view: View, vision: VisionEncoder | None, image_token_id: int | None):
        self._view = view
        self._vision = vision
        self._image_token_id = image_token_id

    def begin(self, request: Request) -> Prompt:
        ids = request.spec.token_ids
        images = request.spec.images
        if not images:
            positions = np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, 1, len(ids)))
            return Prompt(ids, self._view.make_cache(), positions, len(ids), np.empty(0, np.int32))
        if self._vision is None:
            raise InvalidRequest("this model sees no images", "messages")
        index = np.flatnonzero(ids == self._image_token_id).astype(np.int32)
        expected = sum(image.num_tokens for image in images)
        if len(index) != expected:
            raise InvalidRequest(f"{len(index)} image tokens in the prompt, {expected} in its images", "messages")
        positions, next_position = self._positions(ids, images)
        return Prompt(ids, self._view.make_cache(), positions, next_position, index)

    def encode_next_image(self, prompt: Prompt, images: tuple[ImagePatches, ...]) -> bool:
        """Encodes one picture of the prompt; False when there was none left."""
        if len(prompt.features) == len(images):
            return False
        assert self._vision is not None
        prompt.features.append(self._vision.encode(images[len(prompt.features)]))
        if len(prompt.features) == len(images):
            prompt.all_features = mx.concatenate(prompt.features)
        return True

    def advance(self, prompt: Prompt, max_tokens: int) -> tuple[int, mx.array | None]:
        """Takes in the next chunk. Returns its size, and the last position's logits [1, vocab] when it was the last."""
        start = prompt.done
        end = min(start + max_tokens, len(prompt.token_ids))
        token_ids = mx.array(prompt.token_ids[None, start:end].astype(np.int32))
        embeds = self._embed(prompt, token_ids, start, end)
        positions = prompt.positions[..., start:end]
        prompt.done = end
        if end < len(prompt.token_ids):
            self._view.extend(token_ids, embeds, prompt.cache, positions)
            return end - start, None
        return end - start, self._view.extend_to_end(token_ids, embeds, prompt.cache, positions)

    def _embed(self, prompt: Prompt, token_ids: mx.array, start: int, end: int) -> mx.array | None:
        """Embeddings [1, L, hidden] of a chunk that holds image tokens; None when ids say it all."""
        first, last = np.searchsorted(prompt.image_index, (start, end))
        if first == last:
            return None
        embeds = self._view.embed(token_ids)
        assert prompt.all_features is not None
        features = prompt.all_features[int(first) : int(last)]
        embeds[0, mx.array(prompt.image_index[first:last] - start)] = features.astype(embeds.dtype)
        return embeds

    def _positions(self, ids: np.ndarray, images: tuple[ImagePatches, ...]) -> tuple[np.ndarray, int]:
        grids = mx.array([image.grid_thw for image in images], mx.int32)
        positions, deltas = self._view.lm.get_rope_index(mx.array(ids[None].astype(np.int32)), grids)
        return np.array(positions, np.int32), len(ids) + int(np.array(deltas).reshape(-1)[0])


def first_token(logits: mx.array, request: Request) -> int:
    return int(np.array(Sampler([request.spec.sampling])(logits, np.zeros(1, np.int64)))[0])
