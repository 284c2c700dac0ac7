"""Batch: documents in rows of equal length. A batch depends only on what is drawn, its seed and its step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from tests.demo_model.encoding import (
    IMAGE_TOKEN_ID,
    PAD_TOKEN_ID,
    VIDEO_TOKEN_ID,
    Document,
    ImageGrid,
    encode_plain_text,
    encode_sample,
)
from tests.demo_model.tasks.mixes import Mix
from tests.demo_model.tasks.retrieval import retrieval
from tests.demo_model.world.draws import Draws
from tests.demo_model.world.prose import plain_text

POSITION_SIDE = 16
"""Learned positions of patches per side of an image; between them is interpolated."""
PLAIN_TEXT_SHARE = 0.04
SHORT_ROW = 512
"""Tokens of the longest rows that are packed with short tasks; longer rows hold one document."""
LONG_PROMPT_WEIGHT = 0.02
MAX_MISSES = 12
"""Documents in a row that no row has room for, until a batch is taken as full."""


@dataclass(frozen=True)
class Span:
    """Where a document stands in a batch."""

    row: int
    start: int
    end: int
    task: str


@dataclass(frozen=True)
class ImageBatch:
    """All images of a batch, padded to the largest: P patches each."""

    patches: np.ndarray  # uint8 [num_images, P, 3 * patch_size * patch_size]
    is_patch: np.ndarray  # bool [num_images, P]; False: padding
    corners: np.ndarray  # int32 [num_images, P, 4]: the learned positions around a patch
    corner_weights: np.ndarray  # float32 [num_images, P, 4]
    coordinates: np.ndarray  # int32 [num_images, P, 2]: row and column of a patch
    sources: np.ndarray  # int32 [B * T]: index of each token's embedding in those of all tokens, then of all images


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens."""

    token_ids: np.ndarray  # int32 [B, T]
    weights: np.ndarray  # float32 [B, T]
    positions: np.ndarray  # int32 [3, B, T]
    offsets: np.ndarray  # int32 [B, T]: tokens of the same document in front of a token
    documents: np.ndarray  # int32 [B, T]: number of the document in its row, -1 for padding
    spans: tuple[Span, ...]
    images: ImageBatch | None

    @property
    def is_packed(self) -> bool:
        """Return whether a row has more than one document, so that attention needs a mask."""
        return bool((self.documents > 0).any())

    def ahead(self, distance: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens so far ahead in the same document, int32 [B, T], and their weights, float32 [B, T]."""
        token_ids, weights, offsets = (_shifted(x, distance) for x in (self.token_ids, self.weights, self.offsets))
        return token_ids, np.where(offsets == self.offsets + distance, weights, np.float32(0))


def draw_batch(
    mix: Mix, seed: int, step: int, row_tokens: int, batch_tokens: int, prompt_weight: float, foreign_names: bool
) -> Batch:
    """Return packed short tasks of a mix, or one text with needles per row where rows are long."""
    draws = Draws((seed << 32) ^ (step * 7919 + 13), foreign_names)
    num_rows = max(1, batch_tokens // row_tokens)
    if row_tokens > SHORT_ROW:
        return collate([[_long_document(draws, row_tokens)] for _ in range(num_rows)], row_tokens)

    def draw() -> Document:
        if draws.chance(PLAIN_TEXT_SHARE):
            return encode_plain_text(plain_text(draws))
        return encode_sample(draws.weighted(mix)(draws), prompt_weight)

    return collate(pack(draw, num_rows, row_tokens), row_tokens)


def _long_document(draws: Draws, row_tokens: int) -> Document:
    while True:
        document = encode_sample(retrieval(draws, draws.uniform(0.5, 0.93) * row_tokens), LONG_PROMPT_WEIGHT)
        if document.num_tokens <= row_tokens:
            return document


def pack(draw: Callable[[], Document], num_rows: int, row_tokens: int) -> list[list[Document]]:
    """Return rows of documents, each put where it leaves the least room."""
    rows: list[list[Document]] = [[] for _ in range(num_rows)]
    free, misses = [row_tokens] * num_rows, 0
    while misses < MAX_MISSES:
        document = draw()
        if document.num_tokens > row_tokens:
            continue
        fitting = [row for row in range(num_rows) if free[row] >= document.num_tokens]
        if not fitting:
            misses += 1
            continue
        best = min(fitting, key=free.__getitem__)
        rows[best].append(document)
        free[best] -= document.num_tokens
    return rows


def collate(rows: Sequence[Sequence[Document]], row_tokens: int) -> Batch:
    """Return rows of documents as a batch; row_tokens is a multiple of the delta rule's chunk."""
    shape = len(rows), row_tokens
    token_ids, offsets = np.full(shape, PAD_TOKEN_ID, np.int32), np.zeros(shape, np.int32)
    documents, weights = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    positions, spans = np.zeros((3, *shape), np.int32), []
    for row, row_documents in enumerate(rows):
        start = 0
        for number, document in enumerate(row_documents):
            end = start + document.num_tokens
            token_ids[row, start:end], weights[row, start:end] = document.token_ids, document.weights
            positions[:, row, start:end] = document.positions
            offsets[row, start:end], documents[row, start:end] = np.arange(end - start), number
            spans.append(Span(row, start, end, document.task))
            start = end
    images = [image for row_documents in rows for document in row_documents for image in document.images]
    image_batch = _collate_images(images, token_ids) if images else None
    return Batch(token_ids, weights, positions, offsets, documents, tuple(spans), image_batch)


def _collate_images(images: Sequence[ImageGrid], token_ids: np.ndarray) -> ImageBatch:
    largest = max(len(image.patches) for image in images)
    per_patch = [_patch_positions(image.height, image.width) for image in images]
    corners, corner_weights, coordinates = (
        np.stack([_padded(table, largest) for table in tables]) for tables in zip(*per_patch, strict=True)
    )
    is_patch = np.stack([np.arange(largest) < len(image.patches) for image in images])
    sources = np.arange(token_ids.size, dtype=np.int32)
    is_image = np.isin(token_ids.reshape(-1), (IMAGE_TOKEN_ID, VIDEO_TOKEN_ID))
    sources[is_image] = token_ids.size + np.flatnonzero(is_patch[:, ::4])  # a token stands for four patches
    patches = np.stack([_padded(image.patches, largest) for image in images])
    return ImageBatch(patches, is_patch, corners, corner_weights, coordinates, sources)


@cache
def _patch_positions(height: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Corners, their weights (bilinear) and coordinates of each patch, as ImageBatch has them."""
    rows, columns = (np.linspace(0, POSITION_SIDE - 1, size) for size in (height, width))
    row, column = np.meshgrid(rows, columns, indexing="ij")
    top, left = row.astype(int), column.astype(int)
    bottom, right = np.minimum(top + 1, POSITION_SIDE - 1), np.minimum(left + 1, POSITION_SIDE - 1)
    down, across = row - top, column - left
    corners = [y * POSITION_SIDE + x for y in (top, bottom) for x in (left, right)]
    weights = [y * x for y in (1 - down, down) for x in (1 - across, across)]
    coordinates = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    return (
        _in_patch_order(np.stack(corners, axis=-1).astype(np.int32)),
        _in_patch_order(np.stack(weights, axis=-1).astype(np.float32)),
        _in_patch_order(np.stack(coordinates, axis=-1).astype(np.int32)),
    )


def _in_patch_order(table: np.ndarray) -> np.ndarray:
    """[height, width, n] to [height * width, n] in the order of the processor."""
    height, width, _ = table.shape
    return table.reshape(height // 2, 2, width // 2, 2, -1).transpose(0, 2, 1, 3, 4).reshape(height * width, -1)


def _padded(table: np.ndarray, length: int) -> np.ndarray:
    return np.pad(table, ((0, length - len(table)), (0, 0)))


def _shifted(table: np.ndarray, distance: int) -> np.ndarray:
    return np.pad(table[:, distance:], ((0, 0), (0, distance)))
