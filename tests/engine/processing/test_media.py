"""Images from clients: `data:` URLs, limits of a request, budgets, and what every refusal says."""

import asyncio
import hashlib
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from engine.errors import InvalidRequest
from engine.media_config import MediaConfig
from engine.processing import media
from engine.processing.byte_budget import ByteBudget
from engine.processing.media import MAX_REQUEST_BYTES, MediaLoader, check_data_url
from engine.processing.message import ImageSource
from tests.support.image_files import (
    FIELD,
    PNG,
    QWEN3_VL,
    data_url,
    encoded,
    load,
    picture,
    pixels_of,
    refusal,
)

# --- data URLs -----------------------------------------------------------------------------------------------------


def test_a_data_url_is_decoded_to_rgb_with_a_hash_over_its_pixels():
    (image,) = load(data_url(PNG))
    assert pixels_of(image).tolist() == np.asarray(picture()).tolist()
    assert image.content_hash == hashlib.sha256(b"RGB 8x6 " + picture().tobytes()).hexdigest()


def test_the_same_pixels_in_another_shape_have_another_hash():
    pixels = bytes(range(48)) * 3
    wide, tall = (Image.frombytes("RGB", size, pixels) for size in ((8, 6), (6, 8)))
    assert len({image.content_hash for image in load(data_url(encoded(wide)), data_url(encoded(tall)))}) == 2


def test_images_are_returned_in_order():
    urls = [data_url(encoded(picture(8 + i, 8))) for i in range(5)]
    assert [image.grid_thw[2] for image in load(*urls)] == [8, 9, 10, 11, 12]
    assert load() == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:image/png;base64,iVBORw0KGgo", "could not be decoded"),
        ("data:image/png;base64,iVBOR", "not valid base64"),
        ("data:image/png;base64,iVBORw0KGgo===", "not valid base64"),
        ("data:image/png;base64,iVBO=Rw0KGgo", "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
        ("data:image/png,abc", "not of the form data:image/...;base64,..."),
        ("data:image/png;base64", "not of the form"),
        ("data:", "not of the form"),
        ("data:image/png" + ";a" * 121 + ",", "not of the form"),
        ("data:image/png" + ";a" * 122 + ";base64,AAAA", "no comma in its first 256 characters"),
        ("data:" + ";" * 10**6, "no comma in its first 256 characters"),
        ("data:text/html;base64,AAAA", "the media type 'text/html'; expected image/..."),
        ("data:;base64,AAAA", "the media type ''; expected image/..."),
        ("data:image/svg+xml;base64,PHN2Zy8+", "could not be decoded; PNG, JPEG, WebP, GIF and AVIF are supported"),
        ("data:image/png;base64,", "could not be decoded"),
    ],
)
def test_a_bad_data_url_is_refused(url: str, message: str):
    assert message in refusal(url)


@pytest.mark.parametrize(
    "kind", ["76 columns", "CRLF", "last line break", "blanks", "no padding", "for URLs", "percent"]
)
def test_a_data_url_is_read_as_browsers_read_it(kind: str):
    urls = (data_url(encoded(picture(width, seed=seed))) for width in (8, 9, 10) for seed in range(33))
    head, _, text = next(url for url in urls if url.endswith("=") and "+" in url).partition("base64,")
    lines = [text[i : i + 76] for i in range(0, len(text), 76)]
    changed = {
        "76 columns": "\n".join(lines),
        "CRLF": "\r\n".join(lines),
        "last line break": f"{text}\n",
        "blanks": f" {' '.join(lines)}\t\f",
        "no padding": text.rstrip("="),
        "for URLs": text.replace("+", "-").replace("/", "_"),
        "percent": text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D") + "%0A",
    }[kind]
    (expected,), (got,) = load(f"{head}base64,{text}"), load(f"{head}base64,{changed}")
    assert changed != text and np.array_equal(got.patches, expected.patches)


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


def test_a_data_url_is_not_split_before_its_comma_is_found():
    url = "data:" + ";" * 4_000_000
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="no comma"):
        check_data_url(url, 2**30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000


# --- sizes and budgets ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photo() -> str:
    """4032 x 3024, as phones take them."""
    return data_url(encoded(picture(504, 378).resize((4032, 3024)), "JPEG", quality=85), "image/jpeg")


def test_two_photos_of_12_megapixels_fit_into_a_request(photo: str):
    first, second = load(photo, photo, grid=QWEN3_VL)
    assert first.content_hash == second.content_hash and 4500 < first.num_tokens <= 5120
    assert first.patches.nbytes + second.patches.nbytes < MAX_REQUEST_BYTES


def test_four_of_the_largest_images_fit_into_a_request_and_beyond_that_the_limit_is_named():
    large = data_url(encoded(Image.new("RGB", (2300, 2300))))
    images = load(*[large] * 4, grid=QWEN3_VL)
    message = refusal(*[large] * 5, grid=QWEN3_VL)
    num_bytes = 5 * images[0].patches.nbytes
    assert images[0].num_tokens > 5000 and num_bytes > MAX_REQUEST_BYTES
    assert message.startswith(
        f"the images up to this one take {num_bytes} bytes after resizing; the limit for a request"
    )
    assert message.endswith("is 62914560. Send fewer or smaller images, or lower media.max_image_tokens, which is 5120")
    assert len(load(*[large] * 5, grid=QWEN3_VL, max_image_tokens=4096)) == 5


def test_other_images_of_a_request_do_not_change_the_hash_or_grid_of_an_image(photo: str):
    other = data_url(encoded(picture(900, 800)))
    (alone,), (_, among_others, _) = load(photo, grid=QWEN3_VL), load(other, photo, photo, grid=QWEN3_VL)
    assert alone.content_hash == among_others.content_hash and alone.grid_thw == among_others.grid_thw


def test_a_limit_of_tokens_reduces_images_and_does_not_refuse_them():
    url = data_url(encoded(picture(640, 480)))
    assert load(url, grid=QWEN3_VL)[0].num_tokens == 300
    assert load(url, grid=QWEN3_VL, max_image_tokens=300)[0].num_tokens == 300
    assert 80 < load(url, grid=QWEN3_VL, max_image_tokens=100)[0].num_tokens <= 100


def in_loader(test, **limits) -> None:
    async def go() -> None:
        loader = MediaLoader(MediaConfig(**limits), QWEN3_VL)
        try:
            async with asyncio.timeout(120):
                await test(loader)
        finally:
            loader.workers.close()

    asyncio.run(go())


def test_the_images_of_a_request_are_decoded_one_after_the_other():
    sources = [ImageSource(FIELD, data_url(encoded(picture(512, 512, seed)))) for seed in range(16)]

    async def test(loader: MediaLoader) -> None:
        async with loader.load(sources) as images:
            assert len({image.content_hash for image in images}) == 16
            assert loader.decoded.peak_bytes == 512 * 512 * 4, "there are two workers, but one request"
            assert loader.planning.held_bytes == sum(image.patches.nbytes for image in images)
        assert loader.planning.held_bytes == loader.decoded.held_bytes == 0

    in_loader(test)


def test_requests_wait_until_others_release_the_memory_of_their_patches():
    source = [ImageSource(FIELD, data_url(encoded(picture(512, 512))))]

    async def test(loader: MediaLoader) -> None:
        loader.planning = ByteBudget(20 * 2**20)  # of which one request at first reserves 15
        held: list[int] = []

        async def request() -> None:
            async with loader.load(source):
                held.append(loader.planning.held_bytes)

        async with loader.load(source), loader.planning.hold(12 * 2**20):
            waiting = [asyncio.create_task(request()) for _ in range(3)]
            while loader.planning.num_waiting < 3:
                await asyncio.sleep(0.01)
            waiting[0].cancel()
            assert not held
        await asyncio.gather(*waiting, return_exceptions=True)
        assert len(held) == 2 and loader.planning.held_bytes == 0
        assert loader.planning.peak_bytes <= 20 * 2**20

    in_loader(test)


def test_a_failed_request_releases_all_its_bytes():
    sources = [
        ImageSource(FIELD, data_url(PNG)),
        ImageSource("bad", data_url(PNG[:60])),
        ImageSource(FIELD, data_url(encoded(picture(2000, 2000)))),
    ]

    async def test(loader: MediaLoader) -> None:
        with pytest.raises(InvalidRequest) as caught:
            async with loader.load(sources):
                raise AssertionError
        assert caught.value.field == "bad"
        status = loader.status()
        assert {status[f"{name}_bytes"] for name in ("fetched", "decoded", "planning")} == {0}
        async with loader.load(sources[:1]) as images:
            assert len(images) == 1

    in_loader(test)


def test_limits_of_the_config_reach_the_decoder():
    bomb = data_url(encoded(Image.new("RGB", (6000, 6000))))
    assert refusal(bomb, decode_memory_mb=64).startswith("decoding the image takes more than 64 MiB of memory")

    async def test(loader: MediaLoader) -> None:
        assert (loader.decoded.max_bytes, loader.workers._settings.cpu_s) == (3 * 2**20, 7)

    in_loader(test, decode_budget_mb=3, decode_cpu_s=7)


def test_an_image_in_low_detail_is_reduced_to_512_by_512_pixels():
    async def sizes() -> list[tuple[int, ...]]:
        loader = MediaLoader(MediaConfig(), QWEN3_VL)
        url = data_url(encoded(picture(1024, 2048)))
        async with loader.load([ImageSource(FIELD, url), ImageSource(FIELD, url, has_low_detail=True)]) as images:
            return [image.grid_thw for image in images]

    full, low = asyncio.run(sizes())
    side = QWEN3_VL.patch_size
    assert full[1] * full[2] * side**2 == 1024 * 2048
    assert 512 * 512 * 0.9 <= low[1] * low[2] * side**2 <= 512 * 512
