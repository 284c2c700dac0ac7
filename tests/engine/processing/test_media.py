"""Pictures from clients: what is fetched, from where, within which limits, and what every refusal says."""

import base64
import hashlib

import numpy as np
import pytest
from PIL import Image

from engine.processing import media
from engine.processing.media import decode_image
from tests.engine.processing.pictures import PNG, data_url, encoded, load, picture, refusal

# --- data URLs -----------------------------------------------------------------------------------------------------


def test_a_data_url_is_decoded_to_rgb_with_a_hash_over_its_pixels():
    (decoded,) = load(data_url(PNG))
    assert (decoded.image.mode, decoded.image.size) == ("RGB", (8, 6))
    assert decoded.image.tobytes() == picture().tobytes()
    assert decoded.content_hash == hashlib.sha256(b"RGB 8x6 " + picture().tobytes()).hexdigest()


def test_the_same_pixels_in_another_shape_have_another_hash():
    pixels = bytes(range(48)) * 3
    wide, tall = (Image.frombytes("RGB", size, pixels) for size in ((8, 6), (6, 8)))
    assert len({decoded.content_hash for decoded in load(data_url(encoded(wide)), data_url(encoded(tall)))}) == 2


def test_pictures_come_back_in_order():
    urls = [data_url(encoded(picture(8 + i, 8))) for i in range(5)]
    assert [decoded.image.width for decoded in load(*urls)] == [8, 9, 10, 11, 12]
    assert load() == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,iVBORw0KGgo", "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
        ("data:image/png,abc", "not of the form data:image/...;base64,..."),
        ("data:image/png;base64", "not of the form"),
        ("data:text/html;base64,AAAA", "holds 'text/html'; expected an image"),
        ("data:;base64,AAAA", "holds ''; expected an image"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "could not be decoded; PNG, JPEG, WebP and GIF are supported"),
        ("data:image/png;base64,", "could not be decoded"),
    ],
)
def test_a_bad_data_url_is_refused(url: str, message: str):
    assert message in refusal(url)


def test_a_data_url_is_measured_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch):
    exact = data_url(b"x" * 1024, "image/png")
    assert "could not be decoded" in refusal(exact, max_bytes=1024)
    monkeypatch.setattr(base64, "b64decode", None)
    assert refusal(data_url_of(1025), max_bytes=1024) == "the image has 1025 bytes; the limit is 1024"


def data_url_of(num_bytes: int) -> str:
    return data_url(b"x" * num_bytes)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/passwd", "file: URLs are not supported"),
        ("ftp://example.com/a.png", "ftp: URLs are not supported"),
        ("gopher://example.com", "gopher: URLs are not supported"),
        ("/etc/passwd", "paths and bare data are not supported"),
        ("iVBORw0KGgo=", "paths and bare data are not supported"),
        ("", "paths and bare data are not supported"),
    ],
)
def test_other_schemes_and_paths_are_refused_by_name(url: str, message: str):
    assert message in refusal(url)


def test_too_many_images_are_refused_before_any_is_loaded():
    assert refusal(*["http://example.com"] * 3, max_images=2) == "the request has 3 images; the limit is 2"


# --- decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_every_supported_format_is_known_by_its_content(kind: str):
    (decoded,) = load(data_url(encoded(picture(), kind), "image/x-whatever"))
    assert (decoded.image.mode, decoded.image.size) == ("RGB", (8, 6))


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused(kind: str):
    assert "PNG, JPEG, WebP and GIF are supported" in refusal(data_url(encoded(picture(16, 16), kind)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_file_is_refused_without_the_decoders_words(kind: str):
    content = encoded(picture(64, 64), kind)
    for length in (3, 20, len(content) // 2):
        message = refusal(data_url(content[:length]))
        assert message == "the image could not be decoded; PNG, JPEG, WebP and GIF are supported"


def test_pixels_are_counted_before_decoding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(media, "_to_rgb", None)
    message = refusal(data_url(encoded(picture(64, 33))), max_pixels=2048)
    assert message == "the image has 64 x 33 = 2112 pixels; the limit is 2048"


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_decompression_bomb_is_refused(kind: str):
    content = encoded(Image.new("L", (15000, 12000)), kind)
    assert len(content) < 2**20
    assert "pixels" in refusal(data_url(content))


def test_a_sliver_is_refused():
    message = refusal(data_url(encoded(picture(402, 2))))
    assert message == "the image has 402 x 2 pixels; its longer side may have 200 times the shorter one"
    assert load(data_url(encoded(picture(400, 2))))[0].image.width == 400


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=10)
        red, _, blue = (int(v) for v in np.asarray(decode_image(content, 10**4).image)[4, 4])
        assert red > 200 and blue < 50, kind


def test_the_orientation_of_a_photograph_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    (decoded,) = load(data_url(encoded(picture(8, 6), "JPEG", exif=exif)))
    assert decoded.image.size == (6, 8)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(mode: str):
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 2, 4))
    content = encoded(image.convert(mode)) if mode != "P" else encoded(image.quantize(4))
    pixels = np.asarray(decode_image(content, 10**4).image)
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 3].tolist() != [255, 255, 255]


def test_grey_of_16_bits_keeps_its_shades():
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    pixels = np.asarray(decode_image(encoded(Image.fromarray(grey)), 10**4).image)
    assert pixels[..., 0].tolist() == (grey >> 8).tolist()


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK"])
def test_other_colour_modes_become_rgb(mode: str):
    content = encoded(picture().convert(mode), "JPEG" if mode == "CMYK" else "PNG")
    assert decode_image(content, 10**4).image.mode == "RGB"
