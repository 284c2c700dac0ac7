"""Image files that cost more than they weigh, break off, or are something else; and odd ones that are fine."""

import base64
import io
import struct
import zlib
from collections.abc import Iterable
from functools import cache
from typing import Any

from PIL import Image, ImageDraw, ImageOps

from tests.e2e.pictures import shape

PNG_HEAD = b"\x89PNG\r\n\x1a\n"
EXIF_ORIENTATION = 0x0112


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def saved(image: Image.Image, encoding: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, encoding, **options)
    return buffer.getvalue()


@cache
def circle(encoding: str = "PNG", mode: str = "RGB") -> bytes:
    """A red circle, which the demo model knows."""
    return saved(shape("red", "circle").convert(mode), encoding)


# PNG


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@cache
def packed_zeros(num_rows: int, row_bytes: int) -> bytes:
    """Return so many rows of zero bytes, compressed."""
    packer = zlib.compressobj(9)
    row = bytes(row_bytes)
    return b"".join(packer.compress(row) for _ in range(num_rows)) + packer.flush()


def png(width: int, height: int, content: bytes | None = None, more: Iterable[bytes] = (), color: int = 0) -> bytes:
    """Grey by default. content: of the IDAT chunk; None: enough for all rows of one colour. more: chunks before it."""
    bytes_per_pixel = {0: 1, 2: 3, 6: 4}[color]
    if content is None:
        content = packed_zeros(height, 1 + width * bytes_per_pixel)
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    return PNG_HEAD + chunk(b"IHDR", header) + b"".join(more) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def png_with(*more: bytes) -> bytes:
    """The red circle with more chunks in front of its pixels."""
    content = circle()
    return content[:33] + b"".join(more) + content[33:]


def png_text_bomb(kind: bytes, num_mib: int) -> bytes:
    """Compressed text a thousand times as large as its chunk."""
    packed = packed_zeros(num_mib, 2**20)
    head = {b"zTXt": b"a\0\0", b"iTXt": b"a\0\1\0\0\0", b"iCCP": b"a\0\0"}[kind]
    return png_with(chunk(kind, head + packed))


def png_text_flood(num_chunks: int) -> bytes:
    return png_with(*[chunk(b"tEXt", b"a\0" + b"b" * 200)] * num_chunks)


def apng(num_frames: int) -> bytes:
    frames = [Image.new("L", (64, 64), i % 256) for i in range(num_frames)]
    return saved(frames[0], save_all=True, append_images=frames[1:], default_image=False)


def png_of_sixteen_bits() -> bytes:
    grey = shape("red", "circle").convert("L")
    return saved(grey.convert("I").point(lambda value: value * 257).convert("I;16"))


def png_with_alpha() -> bytes:
    image = shape("red", "circle").convert("RGBA")
    image.putalpha(ImageOps.invert(image.convert("L")).point([0] * 26 + [255] * 230))
    return saved(image)


def png_with_a_palette() -> bytes:
    return saved(shape("red", "circle").convert("P", palette=Image.Palette.ADAPTIVE, colors=16), transparency=0)


# JPEG


def progressive_bomb(side: int, num_scans: int) -> bytes:
    """One of the file's scans over and over: each is a pass over all pixels and weighs some sixty bytes."""
    content = saved(Image.new("L", (side, side), 128), "JPEG", progressive=True, quality=60)
    starts = [i for i in range(len(content) - 1) if content[i : i + 2] == b"\xff\xda"]
    end = content.rfind(b"\xff\xd9")
    begin, stop = min(zip(starts[1:], [*starts[2:], end], strict=True), key=lambda scan: scan[1] - scan[0])
    return content[:end] + content[begin:stop] * num_scans + b"\xff\xd9"


def jpeg_with(segments: bytes, content: bytes | None = None) -> bytes:
    """The red circle with more segments behind the start of the image."""
    content = content or circle("JPEG")
    return content[:2] + segments + content[2:]


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def jpeg_of_size(width: int, height: int) -> bytes:
    """The red circle, whose header says another size."""
    content = bytearray(circle("JPEG"))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def turned_jpeg() -> bytes:
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    return saved(shape("red", "circle"), "JPEG", exif=exif, quality=95)


# GIF and WebP


def gif(num_frames: int, size: int = 64) -> bytes:
    frames = [Image.new("P", (size, size), i % 256) for i in range(num_frames)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=20)


def gif_of_size(width: int, height: int) -> bytes:
    content = bytearray(circle("GIF"))
    content[6:10] = struct.pack("<HH", width, height)
    return bytes(content)


def webp(num_frames: int) -> bytes:
    frames = [Image.new("RGB", (64, 64), (i % 256, 0, 0)) for i in range(num_frames)]
    return saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=20)


def webp_of_size(width: int, height: int) -> bytes:
    """The canvas of the extended format, up to 2 ** 24 each way, with a small image on it."""
    body = circle("WEBP")[12:]
    canvas = b"\x10\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"VP8X" + struct.pack("<I", len(canvas)) + canvas + body
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


# Photographs


@cache
def photograph(width: int, height: int, seed: int) -> bytes:
    """A large JPEG with some detail; the seed tells it from the others."""
    image = Image.radial_gradient("L").resize((width, height))
    ImageDraw.Draw(image).text((width // 2, height // 2), str(seed), fill=255)
    return saved(image, "JPEG", quality=70)


# Other formats

OTHER_FORMATS = {
    "BMP": lambda: circle("BMP"),
    "TIFF": lambda: circle("TIFF"),
    "ICO": lambda: circle("ICO"),
    "PCX": lambda: circle("PCX"),
    "TGA": lambda: circle("TGA"),
    "JPEG 2000": lambda: b"\0\0\0\x0cjP  \r\n\x87\n\0\0\0\x14ftypjp2 " + bytes(200),
    "AVIF": lambda: b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miaf" + bytes(300),
    "HEIC": lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(300),
    "PSD": lambda: b"8BPS\0\1" + bytes(6) + b"\0\3" + struct.pack(">II", 100, 100) + b"\0\x08\0\3" + bytes(300),
    "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "SVG with entities": lambda: b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><svg>&b;</svg>',
    "PostScript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    "PDF": lambda: b"%PDF-1.7\n1 0 obj\n<< /Type /Catalog >>\nendobj\n%%EOF",
    "ZIP": lambda: b"PK\3\4" + bytes(200),
    "gzip": lambda: b"\x1f\x8b\x08\0" + bytes(200),
    "ELF": lambda: b"\x7fELF\2\1\1" + bytes(9) + b"\2\0\x3e\0\1" + bytes(200),
    "HTML": lambda: b"<html><img src=x onerror=alert(1)></html>",
    "text": lambda: b"hello",
    "a pickle": lambda: b"cos\nsystem\n(S'true'\ntR.",
}
