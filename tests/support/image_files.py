"""Encoded images, and the patches or refusals that MediaLoader returns for their URLs."""

import asyncio
import base64
import io
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.errors import InvalidRequest
from engine.media_config import MediaConfig
from engine.processing.image_grid import ImageGrid
from engine.processing.image_placeholder import ImagePlaceholder
from engine.processing.media import MediaLoader
from engine.processing.message import ImageSource
from engine.processing.patch_grid import PatchGrid
from engine.processing.public_addresses import Resolver
from engine.protocol import ImagePatches

FIELD = "messages[0].content[1].image_url.url"


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(width: int = 8, height: int = 6, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


UNCHANGED = PatchGrid(patch_size=1, merge_size=1, min_pixels=1, max_pixels=10**9, resample=3)
"""A grid that resizes nothing, and whose patches are the pixels."""

QWEN3_VL = PatchGrid(patch_size=16, merge_size=2, min_pixels=256**2, max_pixels=4096**2, resample=3)
"""The grid of Qwen3-VL's processor."""


def pixels_of(image: ImagePatches) -> np.ndarray:
    """uint8 [height, width, 3] of an image that was cut by UNCHANGED."""
    _, height, width = image.grid_thw
    return image.patches.reshape(height, width, 3)


def placeholders(*num_tokens: int) -> list[ImagePlaceholder]:
    """Placeholders of images with so many tokens each, in the prompts of Qwen's models."""
    return [ImagePlaceholder("<|image_pad|>", (num,)) for num in num_tokens]


def load(
    *urls: str, grid: ImageGrid = UNCHANGED, resolver: Resolver | None = None, **limits: Any
) -> list[ImagePatches]:
    async def go() -> list[ImagePatches]:
        loader = MediaLoader(MediaConfig(**limits), grid, resolver)
        try:
            async with loader.load([ImageSource(FIELD, url) for url in urls]) as images:
                return list(images)
        finally:
            loader.workers.close()

    return asyncio.run(go())


def refusal(*urls: str, **limits: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        load(*urls, **limits)
    assert caught.value.field == FIELD
    return caught.value.message


def scan_bomb(num_scans: int, side: int = 256) -> bytes:
    """A progressive JPEG whose shortest scan is repeated: each repetition costs a pass over all pixels."""
    content = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True, quality=60)
    starts, end = [match.start() for match in re.finditer(rb"\xff\xda", content)], content.rfind(b"\xff\xd9")
    scans = [content[a:b] for a, b in pairwise([*starts, end])]
    shortest = min(scans[1:], key=len)
    return content[:end] + shortest * (num_scans - len(scans)) + content[end:]


PNG = encoded(picture())
