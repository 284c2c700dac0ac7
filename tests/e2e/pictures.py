"""Pictures that the demo model knows: flat shapes, drawn with PIL."""

import base64
import io
from typing import Any

from PIL import Image, ImageDraw

COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (45, 80, 220), "yellow": (240, 215, 40)}


def shape(color: str, kind: str, size: int = 128) -> Image.Image:
    picture = Image.new("RGB", (size, size), (245, 245, 245))
    draw = ImageDraw.Draw(picture)
    box = [size * 0.3, size * 0.3, size * 0.7, size * 0.7]
    if kind == "circle":
        draw.ellipse(box, fill=COLORS[color])
    else:
        assert kind == "square"
        draw.rectangle(box, fill=COLORS[color])
    return picture


def image_part(picture: Image.Image, encoding: str = "png") -> dict[str, Any]:
    buffer = io.BytesIO()
    picture.save(buffer, encoding.upper(), **({} if encoding == "png" else {"quality": 95}))
    content = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{encoding};base64,{content}"}}


def about(question: str, *parts: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation of one question about pictures."""
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
