"""ImageFile: an encoded image from a client, with the checks before it is decoded, and its pixels as RGB.

Image workers import this module, so it imports only NumPy and Pillow.
"""

import io
import re
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from PIL import (
    AvifImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageChops,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
)

T = TypeVar("T")

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF")
PLUGINS = (PngImagePlugin, JpegImagePlugin, WebPImagePlugin, GifImagePlugin, AvifImagePlugin)
"""Imported at the start, as the process is under its limits when the first image arrives."""
MAX_SIDE_RATIO = 200
MAX_JPEG_SCANS = 64
"""Most scans of a JPEG. Encoders write at most 12, and each costs a pass over all pixels."""
MAX_SEGMENTS = 65_536
"""Most JPEG segments or PNG chunks. 20 MB in libpng's chunks of 8 kB are 2500."""
DRAFT_GAP = 2
"""A JPEG is decoded at a reduced size of at least this factor times the target size: Pillow's recommendation
(reducing_gap), at which the difference to decoding at full size is hardly visible."""
BAND_ROWS = 256
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # the limits of the process count the time of all threads
UNDECODABLE = "the image could not be decoded; PNG, JPEG, WebP, GIF and AVIF are supported"
HEIC = "the image is HEIC, which is not supported; send JPEG, PNG, WebP, GIF or AVIF"
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")

_JPEG_SIGNATURE = b"\xff\xd8"
_FILLINGS = b"\x00" * 1024, b"\x5a" * 1024
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_METADATA = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_PNG_ORIENTATION = re.compile(rb"XML:com\.adobe\.xmp\0\0|Raw profile type exif\0")
"""Texts that may have the orientation."""
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height


class ImageRefused(Exception):
    """The image is broken or exceeds a limit. The message, for the client, names the value and the limit."""


class ImageFile:
    """Reads the header at once and the pixels later. The format is determined by the content alone.

    Args:
        content: The encoded image.
        max_pixels: Most pixels, width times height.

    Raises:
        ImageRefused: For every error, without the decoder's message, which may contain memory addresses.
    """

    def __init__(self, content: bytes | bytearray, max_pixels: int):
        is_cut = False
        if content[:2] == _JPEG_SIGNATURE:
            is_cut = not check_jpeg_segments(content)
        elif content[:8] == _PNG_SIGNATURE:
            content = without_metadata(content, check_png_chunks(content))
        self._cut_content = content if is_cut else None
        try:
            if content[4:8] == b"ftyp" and content[8:12] in _HEIC_BRANDS and b"avif" not in content[16:64]:
                raise ImageRefused(HEIC)
            self._opened = _decoding(lambda: Image.open(io.BytesIO(content), formats=FORMATS))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise ImageRefused(f"the image has more than {max_pixels} pixels, which is the limit") from None
        width, height = self._opened.size
        if width * height > max_pixels:
            raise ImageRefused(f"the image has {width} x {height} = {width * height} pixels; the limit is {max_pixels}")
        check_sides(width, height)
        is_turned = _decoding(lambda: self._opened.getexif().get(ExifTags.Base.Orientation)) in _TURNED
        self.size = (height, width) if is_turned else (width, height)
        """Width and height of the upright image."""

    def rgb(self, target_size: tuple[int, int]) -> Image.Image:
        """Decode the first frame: upright, RGB, transparent parts on white. Raises ImageRefused, MemoryError.

        Args:
            target_size: Required width and height; a much larger JPEG is decoded at 1/2, 1/4 or 1/8 of its size.
        """
        return _decoding(lambda: self._rgb(target_size))

    def _rgb(self, target_size: tuple[int, int]) -> Image.Image:
        width, height = target_size if self.size == self._opened.size else target_size[::-1]
        draft_size = width * DRAFT_GAP, height * DRAFT_GAP
        if self._cut_content is None:
            self._opened.draft(None, draft_size)
            self._opened.load()
        else:
            self._opened = _complete_jpeg(self._cut_content, draft_size)
        ImageOps.exif_transpose(self._opened, in_place=True)
        return to_rgb(self._opened)


def check_sides(width: int, height: int) -> None:
    """Raise ImageRefused for an empty or extremely narrow image, which processors of Qwen2-VL do not support."""
    if min(width, height) < 1 or max(width, height) > MAX_SIDE_RATIO * min(width, height):
        raise ImageRefused(
            f"the image has {width} x {height} pixels; the longer side may be at most {MAX_SIDE_RATIO} times the other"
        )


def check_jpeg_segments(content: bytes | bytearray) -> bool:
    """Return whether the first image of a JPEG has its end mark; raise ImageRefused for too many scans or segments."""
    position, num_scans, num_segments = 2, 0, 0
    while match := _JPEG_MARKER.search(content, position):
        marker, position = content[match.start() + 1], match.end()
        if marker == _EOI:
            return True
        if marker in (_SOI, _TEM):
            continue
        num_segments += 1
        num_scans += marker == _SOS
        if num_scans > MAX_JPEG_SCANS:
            raise ImageRefused(f"the JPEG image has more than {MAX_JPEG_SCANS} scans, which is the limit")
        if num_segments > MAX_SEGMENTS:
            raise ImageRefused(f"the JPEG image has more than {MAX_SEGMENTS} segments, which is the limit")
        position += int.from_bytes(content[position : position + 2], "big")
    return False


def check_png_chunks(content: bytes | bytearray) -> list[tuple[int, int]]:
    """Return the places of a PNG's metadata; raise ImageRefused for too many chunks. Both up to its first frame's end.

    Pillow decompresses texts and colour profiles and refuses images where these are large. Orientation is kept.
    """
    position, num_chunks, has_pixels = len(_PNG_SIGNATURE), 0, False
    metadata: list[tuple[int, int]] = []
    while position + 8 <= len(content):
        kind = bytes(content[position + 4 : position + 8])
        if kind == b"IEND" or (has_pixels and kind in (b"fcTL", b"fdAT")):
            break
        has_pixels |= kind == b"IDAT"
        num_chunks += 1
        if num_chunks > MAX_SEGMENTS:
            raise ImageRefused(f"the PNG image has more than {MAX_SEGMENTS} chunks, which is the limit")
        end = position + 12 + int.from_bytes(content[position : position + 4], "big")
        if kind in _PNG_METADATA and not _PNG_ORIENTATION.match(content, position + 8):
            metadata.append((position, end))
        position = end
    return metadata


def without_metadata(content: bytes | bytearray, places: list[tuple[int, int]]) -> bytes | bytearray:
    """Return a copy without these places, the content itself if there are none."""
    if not places:
        return content
    starts, ends = [0, *(end for _, end in places)], [*(start for start, _ in places), len(content)]
    view = memoryview(content)
    return b"".join(view[start:end] for start, end in zip(starts, ends, strict=True) if start < end)


def _complete_jpeg(content: bytes | bytearray, draft_size: tuple[int, int]) -> Image.Image:
    """Decode a JPEG without its end mark; raise ImageRefused if pixels are missing, too.

    Decoders fill missing pixels with what they find: it is complete if different fillings change nothing.
    """
    decoded: list[Image.Image] = []
    for filling in _FILLINGS:
        image = Image.open(io.BytesIO(bytes(content) + filling + b"\xff\xd9"), formats=("JPEG",))
        image.draft(None, draft_size)
        image.load()
        decoded.append(image)
    if ImageChops.difference(*decoded).getbbox() is not None:
        raise ImageRefused("the JPEG image is cut off: pixels are missing at its end")
    return decoded[0]


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a decoded image of any mode to RGB, transparent parts on white."""
    if image.mode.startswith("I"):  # 16 bits of grey, which convert() would clip to 8
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    rgb = Image.new("RGB", image.size)
    for top in range(0, image.height, BAND_ROWS):  # in bands, to avoid a third copy of all pixels
        band = image.crop((0, top, image.width, min(top + BAND_ROWS, image.height)))
        rgb.paste(Image.alpha_composite(Image.new("RGBA", band.size, "white"), band).convert("RGB"), (0, top))
    return rgb


def _decoding(step: Callable[[], T]) -> T:
    try:
        return step()
    except (ImageRefused, MemoryError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise
    except Exception:  # decoders raise many exception types for broken files
        raise ImageRefused(UNDECODABLE) from None
