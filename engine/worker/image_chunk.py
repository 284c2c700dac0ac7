"""ImageChunk: a chunk of a prompt with images, or whose tokens see each other, as the language model takes it."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.processing.vision_family import AttentionKind
from engine.worker.image_attention import EVERY_KIND, both_ways, image_runs
from engine.worker.kv_cache import SequenceCache


@dataclass(frozen=True)
class ImageChunk:
    """A chunk of a prompt with image tokens, or whose tokens see each other. n: number of image tokens."""

    embeds: mx.array
    """[1, L, hidden], of all tokens of the chunk, text and images."""
    places: np.ndarray
    """int [n], where the image tokens are in the chunk, ascending."""
    deepstack: mx.array
    """[n, num_deepstack * hidden], added to the image tokens' hidden states after each of the first layers; of width 0
    without deepstack features."""
    both_ways: frozenset[AttentionKind] = frozenset()
    """Layers in which image tokens that follow one another see each other."""
    per_layer: mx.array | None = None
    """[1, L, layers, width], see `LanguageModel.per_layer_inputs`."""
    num_whole: int = 0
    """Tokens at its beginning that see each other in all layers, see ModelRunner.whole_prompts."""

    def but_last(self) -> "ImageChunk":
        """Return the chunk without its last token, which no other may see."""
        assert not self.num_whole
        length = self.embeds.shape[1] - 1
        num_left = int(np.searchsorted(self.places, length))
        return ImageChunk(
            self.embeds[:, :length],
            self.places[:num_left],
            self.deepstack[:num_left],
            self.both_ways,
            None if self.per_layer is None else self.per_layer[:, :length],
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's layers."""
        length, hidden = self.embeds.shape[1:]
        found: dict[str, Any] = {"inputs_embeds": self.embeds}
        if self.per_layer is not None:
            found["per_layer_inputs"] = self.per_layer
        if self.deepstack.shape[-1]:
            is_image = np.zeros((1, length), bool)
            is_image[0, self.places] = True
            layers = mx.split(self.deepstack, self.deepstack.shape[-1] // hidden, axis=-1)
            found |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": layers}
        return found


def masked(chunk: ImageChunk | None, cache: SequenceCache) -> AbstractContextManager[None]:
    """Let a row's caches mask the images of a chunk, or all of it, as the model's family does."""
    if chunk is None:
        return nullcontext()
    length = chunk.embeds.shape[1]
    if chunk.num_whole:
        run = np.where(np.arange(length) < chunk.num_whole, 0, -1)
        return both_ways(cache, run, EVERY_KIND, beyond_window=True)
    if chunk.both_ways:
        return both_ways(cache, image_runs(chunk.places, length), chunk.both_ways)
    return nullcontext()
