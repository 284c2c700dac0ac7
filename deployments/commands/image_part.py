"""Reads an image file as a part of a chat message."""

from pathlib import Path
from typing import Any

from deployments.commands.connection import data_url
from deployments.commands.output import CommandError

MAX_BYTES = 24 * 2**20
"""As base64 it fits into a request body of 32 MiB, the server's default limit."""


def image_part(path: Path) -> dict[str, Any]:
    """Return the part of a message that has the image. Raises CommandError."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CommandError(f"{path} has {size} bytes; an image may have at most {MAX_BYTES}")
        content = path.read_bytes()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    kind = _kind(content)
    if kind is None:
        raise CommandError(f"{path} is no image: it begins like none of PNG, JPEG, WebP, GIF and AVIF")
    return {"type": "image_url", "image_url": {"url": data_url(content, f"image/{kind}")}}


def _kind(content: bytes) -> str | None:
    """Return the format by the first bytes; the name of a file may say anything."""
    starts = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif"}
    for start, kind in starts.items():
        if content.startswith(start):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    return "avif" if content[4:12] in (b"ftypavif", b"ftypavis") else None
