"""VisionEncoder: encodes images into the language model's space, piece by piece, and caches their features."""

from collections import OrderedDict
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.processing.patch_normalization import PatchNormalization
from engine.processing.vision_family import AttentionKind
from engine.protocol import ImagePatches
from engine.worker.vision_tower import Grid, TowerState, VisionTower


@dataclass(slots=True, eq=False)
class ImageEncoding:
    """An image being encoded."""

    image: ImagePatches
    num_done: int = 0
    """Blocks of the tower computed so far."""
    state: TowerState | None = None
    """The hidden states after those blocks; None before the first and after the last."""
    features: mx.array | None = None
    """See VisionTower.finish; once the image is encoded."""


class VisionEncoder:
    """Encodes images in pieces, and caches features by content, least recently used first out.

    Args:
        tower: The model's vision tower.
        normalization: Normalization of the pixels.
        max_bytes: Limit of the cached features.
        both_ways: Layers of the language model in which the tokens of an image see each other; with any, no chunk of a
            prompt may end among them.
        adds_features: Whether features are added to the embedding of the image token instead of replacing it.
    """

    def __init__(
        self,
        tower: VisionTower,
        normalization: PatchNormalization,
        max_bytes: int,
        both_ways: frozenset[AttentionKind] = frozenset(),
        adds_features: bool = False,
    ):
        self.both_ways, self.adds_features = both_ways, adds_features
        self._tower = tower
        self._norm = normalization
        self._max_bytes = max_bytes
        self._cache: OrderedDict[str, mx.array] = OrderedDict()
        self.num_cached_bytes = 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the tower; each piece of an image has at least one."""
        return self._tower.num_blocks

    @property
    def probe_grids(self) -> list[Grid]:
        return self._tower.probe_grids()

    def begin(self, image: ImagePatches) -> ImageEncoding:
        """Return an encoding that has not begun, or a complete one if the features are cached."""
        features = self._cache.get(image.content_hash)
        if features is not None:
            self._cache.move_to_end(image.content_hash)
        return ImageEncoding(image, features=features)

    def advance(self, encoding: ImageEncoding, num_blocks: int) -> None:
        """Compute the next `num_blocks` blocks, evaluated; cache the features after the last one."""
        self._run(encoding, num_blocks)
        if encoding.features is not None:
            self._remember(encoding.image.content_hash, encoding.features)

    def encode(self, image: ImagePatches) -> mx.array:
        """Return the features of an image, evaluated, cached or encoded in one piece."""
        encoding = self.begin(image)
        if encoding.features is None:
            self.advance(encoding, self.num_blocks)
        assert encoding.features is not None
        return encoding.features

    def probe(self, grid: Grid) -> tuple[int, int, int]:
        """Encode a black image; return its numbers of patches and tokens, and the bytes of its features."""
        encoding = ImageEncoding(self._black(grid))
        self._run(encoding, self.num_blocks)
        assert encoding.features is not None
        return len(encoding.image.patches), encoding.features.shape[0], encoding.features.nbytes

    def probe_pieces(self, grid: Grid) -> int:
        """Encode a black image block by block; return the most bytes that are kept between two pieces.

        Deepstack features do not count: they become part of the image's features.
        """
        encoding, most = ImageEncoding(self._black(grid)), 0
        while encoding.features is None:
            self._run(encoding, 1)
            if (state := encoding.state) is not None:
                most = max(most, sum(array.nbytes for array in (state.hidden, *state.fixed, *state.taken)))
        return most

    def _black(self, grid: Grid) -> ImagePatches:
        frames, height, width = grid
        channels, side = len(self._norm.mean), self._tower.patch_size
        return ImagePatches(np.zeros((frames * height * width, channels, side, side), np.uint8), grid, 0, "")

    def clear(self) -> None:
        """Drop all cached features."""
        self._cache.clear()
        self.num_cached_bytes = 0

    def _run(self, encoding: ImageEncoding, num_blocks: int) -> None:
        image, tower = encoding.image, self._tower
        start, end = encoding.num_done, min(encoding.num_done + max(num_blocks, 1), self.num_blocks)
        state = encoding.state or tower.begin(self._pixels(image), image.grid_thw)
        state.tiles, state.unpadded, state.inner = image.tiles, image.unpadded, image.inner
        state.thumbnail = image.thumbnail
        for index in range(start, end):
            tower.run_block(index, state)  # replaces the hidden states of the last piece, which frees them
            mx.async_eval(state.arrays)  # one by one: macOS aborts commands that keep the GPU for several seconds
        encoding.num_done = end
        if end < self.num_blocks:
            mx.eval(state.arrays)
            encoding.state = state
        else:
            encoding.state, encoding.features = None, tower.finish(state)
            del state
            mx.eval(encoding.features)

    def _pixels(self, image: ImagePatches) -> mx.array:
        """Normalize uint8 [n, C, p, p] to float32; frames have [n, C * frames, p, p]."""
        num_frames = image.patches.shape[1] // len(self._norm.mean)
        values = (np.repeat(np.array(value, np.float32), num_frames) for value in (self._norm.mean, self._norm.std))
        mean, std = (mx.array(value).reshape(1, -1, 1, 1) for value in values)
        return (self._norm.rescaled(mx.array(image.patches).astype(mx.float32)) - mean) / std

    def _remember(self, key: str, features: mx.array) -> None:
        if features.nbytes > self._max_bytes:
            return
        self._cache[key] = features
        self.num_cached_bytes += features.nbytes
        while self.num_cached_bytes > self._max_bytes:
            _, oldest = self._cache.popitem(last=False)
            self.num_cached_bytes -= oldest.nbytes
