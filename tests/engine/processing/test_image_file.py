"""Encoded images of every format: their pixels, and files that are refused before decoding."""

import struct
import timeit
import tracemalloc
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from engine.processing import image_file
from engine.processing.image_file import MAX_JPEG_SCANS, MAX_SEGMENTS, UNDECODABLE, ImageFile, ImageRefused
from tests.support.image_files import encoded, picture, scan_bomb


def decoded(content: bytes, max_pixels: int = 10**4) -> Image.Image:
    file = ImageFile(content, max_pixels)
    return file.rgb(file.size)


def refusal(content: bytes, max_pixels: int = 40_000_000) -> str:
    with pytest.raises(ImageRefused) as caught:
        decoded(content, max_pixels)
    return str(caught.value)


@pytest.mark.parametrize("kind", image_file.FORMATS)
def test_every_supported_format_is_known_by_its_content(kind: str):
    image = decoded(encoded(picture(), kind))
    assert (image.mode, image.size) == ("RGB", (8, 6))


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused(kind: str):
    assert refusal(encoded(picture(16, 16), kind)) == UNDECODABLE


@pytest.mark.parametrize("brands", [b"heic\0\0\0\0mif1heic", b"mif1\0\0\0\0mif1heic", b"heix\0\0\0\0"])
def test_heic_is_refused_with_what_to_send(brands: bytes):
    assert refusal(b"\0\0\0\x18ftyp" + brands + bytes(64)) == image_file.HEIC


def test_an_avif_image_is_turned_upright_and_held_to_the_limit_of_pixels():
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(picture(40, 20), "AVIF", exif=exif)
    assert decoded(content).size == (20, 40)
    assert refusal(content, 799) == "the image has 40 x 20 = 800 pixels; the limit is 799"


@pytest.mark.parametrize("kind", image_file.FORMATS)
def test_a_truncated_file_is_refused_without_the_decoders_words(kind: str):
    content = encoded(picture(64, 64), kind)
    for length in (3, 20, len(content) // 2):
        assert refusal(content[:length]) in (UNDECODABLE, "the JPEG image is cut off: pixels are missing at its end")


def with_chunk(png: bytes, kind: bytes, data: bytes) -> bytes:
    """A PNG with a chunk behind its header."""
    chunk = struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return png[:33] + chunk + png[33:]


LARGE = b"x" * 2**21


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (b"tEXt", b"Comment\0" + LARGE),
        (b"zTXt", b"Comment\0\0" + zlib.compress(LARGE)),
        (b"iTXt", b"Comment\0\1\0en\0\0" + zlib.compress(LARGE)),
        (b"iCCP", b"Profile\0\0" + zlib.compress(LARGE)),
        (b"iCCP", b"Profile\0\0no zlib stream"),
    ],
)
def test_large_or_broken_metadata_of_a_png_does_not_matter(kind: bytes, data: bytes):
    png = encoded(picture(), "PNG")
    assert decoded(with_chunk(png, kind, data)).tobytes() == decoded(png).tobytes()


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 30}, {"subsampling": 0}])
@pytest.mark.parametrize("ending", [b"", b"\0\0", b"\n"])
def test_a_jpeg_without_its_end_mark_is_decoded(options: dict[str, object], ending: bytes):
    jpeg = encoded(picture(70, 50), "JPEG", **options)
    assert jpeg.endswith(b"\xff\xd9")
    assert decoded(jpeg[:-2] + ending).tobytes() == decoded(jpeg).tobytes()


@pytest.mark.parametrize("missing", [10, 100, 1000])
def test_a_jpeg_with_missing_pixels_is_refused(missing: int):
    jpeg = encoded(Image.effect_noise((200, 150), 80).convert("RGB"), "JPEG")
    assert refusal(jpeg[:-missing]) == "the JPEG image is cut off: pixels are missing at its end"


def test_pixels_are_counted_before_decoding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image_file, "to_rgb", None)
    message = refusal(encoded(picture(64, 33)), max_pixels=2048)
    assert message == "the image has 64 x 33 = 2112 pixels; the limit is 2048"


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_decompression_bomb_is_refused(kind: str):
    content = encoded(Image.new("L", (15000, 12000)), kind)
    assert len(content) < 2**20
    assert "pixels" in refusal(content)


def test_an_image_with_an_extreme_aspect_ratio_is_refused():
    message = refusal(encoded(picture(402, 2)))
    assert message == "the image has 402 x 2 pixels; the longer side may be at most 200 times the other"
    assert decoded(encoded(picture(400, 2))).width == 400


def test_the_first_frame_of_an_animation_is_decoded():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=10)
        red, _, blue = (int(v) for v in np.asarray(decoded(content))[4, 4])
        assert red > 200 and blue < 50, kind


def test_the_orientation_of_a_photograph_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert decoded(encoded(picture(8, 6), "JPEG", exif=exif)).size == (6, 8)
    assert ImageFile(encoded(picture(8, 6), "JPEG", exif=exif), 10**4).size == (6, 8)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(mode: str):
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 2, 4))
    content = encoded(image.convert(mode)) if mode != "P" else encoded(image.quantize(4))
    pixels = np.asarray(decoded(content))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 3].tolist() != [255, 255, 255]


def test_a_16_bit_grey_image_keeps_its_shades():
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    pixels = np.asarray(decoded(encoded(Image.fromarray(grey))))
    assert pixels[..., 0].tolist() == (grey >> 8).tolist()


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
def test_other_colour_modes_become_rgb(mode: str):
    content = encoded(picture().convert(mode), "JPEG" if mode == "CMYK" else "PNG")
    assert decoded(content).mode == "RGB"


def test_transparency_is_blended_as_pillow_blends_the_whole_image():
    rgba = np.random.default_rng(0).integers(0, 256, (image_file.BAND_ROWS + 40, 9, 4), dtype=np.uint8)
    image = Image.fromarray(rgba)
    expected = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    assert decoded(encoded(image)).tobytes() == expected.tobytes()


# --- what is counted before decoding -------------------------------------------------------------------------------


def test_a_jpeg_of_more_scans_than_encoders_write_is_refused(monkeypatch: pytest.MonkeyPatch):
    assert decoded(scan_bomb(MAX_JPEG_SCANS), 2**16).size == (256, 256)
    monkeypatch.setattr(Image, "open", None)
    message = f"the JPEG image has more than {MAX_JPEG_SCANS} scans, which is the limit"
    assert refusal(scan_bomb(MAX_JPEG_SCANS + 1)) == message


def test_only_scans_of_the_image_itself_are_counted():
    """Cameras put previews, videos and maps of their own in front of and behind the image."""
    content = encoded(picture(64, 64), "JPEG", progressive=True)
    junk = b"\xff\xda" * 10_000
    segment = b"\xff\xe1" + struct.pack(">H", 2 + len(junk)) + junk
    assert decoded(content[:2] + segment + content[2:] + junk).size == (64, 64)


def test_a_jpeg_of_too_many_segments_is_refused(monkeypatch: pytest.MonkeyPatch):
    content = encoded(picture(64, 64), "JPEG")
    monkeypatch.setattr(Image, "open", None)
    message = f"the JPEG image has more than {MAX_SEGMENTS} segments, which is the limit"
    assert refusal(content[:2] + b"\xff\xe5\0\2" * (MAX_SEGMENTS + 1) + content[2:]) == message


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.parametrize("place", [33, -12])  # behind the header, in front of the end
def test_a_png_of_too_many_chunks_is_refused(place: int, monkeypatch: pytest.MonkeyPatch):
    content = encoded(picture())
    monkeypatch.setattr(Image, "open", None)
    bomb = content[:place] + chunk(b"tEXt", b"a\0b") * (MAX_SEGMENTS + 1) + content[place:]
    assert refusal(bomb) == f"the PNG image has more than {MAX_SEGMENTS} chunks, which is the limit"


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP", b"iTXt"])
def test_compressed_text_in_a_png_is_not_decompressed_without_limit(kind: bytes):
    compressed = zlib.compress(bytes(200 * 2**20), 9)
    data = {b"zTXt": b"a\0\0", b"iCCP": b"a\0\0", b"iTXt": b"a\0\1\0\0\0"}[kind] + compressed
    content = encoded(picture())
    bomb = content[:33] + chunk(kind, data) + content[33:]
    tracemalloc.start()
    with suppress(ImageRefused):  # taken without the text, or refused
        decoded(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * 2**20


def animation(kind: str, num_frames: int) -> bytes:
    """An animation of many frames: those behind the second are copies of it, byte by byte."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=10)
    if kind == "GIF":
        second = content.rindex(b"\x21\xf9")
        return content[:second] + content[second:-1] * (num_frames - 1) + content[-1:]
    if kind == "PNG":
        second = content.index(b"fcTL", content.index(b"IDAT")) - 4
        return content[:second] + content[second:-12] * (num_frames - 1) + content[-12:]
    second = content.rindex(b"ANMF")
    content = content[:second] + content[second:] * (num_frames - 1)
    return content[:4] + struct.pack("<I", len(content) - 8) + content[8:]


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_an_animation_of_many_frames_is_read_without_decoding_all_of_them(kind: str):
    few, many = animation(kind, 3), animation(kind, 100_000)
    assert len(many) > 4_000_000 and decoded(few).tobytes() == decoded(many).tobytes()
    seconds = {len(content): min(timeit.repeat(lambda c=content: decoded(c), number=1)) for content in (few, many)}
    assert seconds[len(many)] < 3, "decoding all frames takes many seconds"


# --- early reduction -----------------------------------------------------------------------------------------------


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size():
    content = encoded(picture(512, 256), "JPEG")
    assert ImageFile(content, 10**6).rgb((32, 16)).size == (64, 32)
    assert ImageFile(content, 10**6).rgb((128, 64)).size == (256, 128)
    assert ImageFile(content, 10**6).rgb((129, 64)).size == (512, 256)


def test_a_rotated_jpeg_is_reduced_like_an_upright_one():
    exif = Image.Exif()
    exif[0x0112] = 8
    content = encoded(picture(512, 256), "JPEG", exif=exif)
    file = ImageFile(content, 10**6)
    assert file.size == (256, 512) and file.rgb((16, 32)).size == (32, 64)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_other_formats_are_not_reduced(kind: str):
    assert ImageFile(encoded(picture(512, 256), kind), 10**6).rgb((8, 4)).size == (512, 256)
