"""Encoded pictures, and what MediaLoader makes of their URLs or says against them."""

import asyncio
import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.config import MediaConfig
from engine.processing.media import DecodedImage, MediaLoader
from engine.protocol import InvalidRequest

FIELD = "messages[0].content[1].image_url.url"


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(width: int = 8, height: int = 6, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def load(*urls: str, **limits: Any) -> list[DecodedImage]:
    loader = MediaLoader(MediaConfig(**limits))
    return asyncio.run(loader.load_images([(FIELD, url) for url in urls]))


def refusal(*urls: str, **limits: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        load(*urls, **limits)
    assert caught.value.field == FIELD
    return caught.value.message


PNG = encoded(picture())
