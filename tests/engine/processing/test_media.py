"""Images from clients: `data:` URLs, limits of a request, budgets, and what every refusal says."""

import hashlib

import numpy as np
import pytest
from PIL import Image

from engine.processing import media
from tests.engine.processing.pictures import PNG, data_url, encoded, load, picture, pixels_of, refusal

# --- data URLs -----------------------------------------------------------------------------------------------------


def test_a_data_url_is_decoded_to_rgb_with_a_hash_over_its_pixels():
    (image,) = load(data_url(PNG))
    assert pixels_of(image).tolist() == np.asarray(picture()).tolist()
    assert image.content_hash == hashlib.sha256(b"RGB 8x6 " + picture().tobytes()).hexdigest()


def test_the_same_pixels_in_another_shape_have_another_hash():
    pixels = bytes(range(48)) * 3
    wide, tall = (Image.frombytes("RGB", size, pixels) for size in ((8, 6), (6, 8)))
    assert len({image.content_hash for image in load(data_url(encoded(wide)), data_url(encoded(tall)))}) == 2


def test_pictures_come_back_in_order():
    urls = [data_url(encoded(picture(8 + i, 8))) for i in range(5)]
    assert [image.grid_thw[2] for image in load(*urls)] == [8, 9, 10, 11, 12]
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
    monkeypatch.setattr(media, "data_url_text", None)
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
