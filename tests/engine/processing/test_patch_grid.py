"""Sizes and patches, compared with what transformers' processor makes of the same image."""

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from engine.processing.image_file import ImageFile
from engine.processing.image_grid import CutImage
from engine.processing.patch_grid import PatchGrid
from tests.support.image_files import QWEN3_VL, encoded, picture

SMALL = PatchGrid(patch_size=16, merge_size=2, resample=3, min_pixels=64**2, max_pixels=256**2)
QWEN2_VL = PatchGrid(patch_size=14, merge_size=2, resample=3, min_pixels=56**2, max_pixels=28 * 28 * 1280)


def reference(image: Image.Image, grid: PatchGrid) -> tuple[np.ndarray, tuple[int, int]]:
    """uint8 patches and grid as transformers makes them."""
    processor = Qwen2VLImageProcessorPil(
        patch_size=grid.patch_size,
        merge_size=grid.merge_size,
        size={"shortest_edge": grid.min_pixels, "longest_edge": grid.max_pixels},
    )
    output = processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
    _, height, width = (int(n) for n in output["image_grid_thw"][0])
    flat = output["pixel_values"].reshape(height * width, 3, -1, grid.patch_size, grid.patch_size)
    return flat[:, :, 0].astype(np.uint8), (height, width)


def cut(content: bytes, grid: PatchGrid) -> CutImage:
    file = ImageFile(content, 40_000_000)
    target = grid.target_size(*file.size)
    return grid.cut(file.rgb(target), file.size)


@given(
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([SMALL, QWEN3_VL, QWEN2_VL]),
)
def test_the_resized_size_equals_that_of_transformers(width: int, height: int, grid: PatchGrid):
    assume(max(width, height) <= 200 * min(width, height))
    expected = smart_resize(height, width, grid.factor, grid.min_pixels, grid.max_pixels)
    assume(expected[0] * expected[1] <= grid.max_pixels)
    assert grid.target_size(width, height) == expected[::-1]


@pytest.mark.parametrize("size", [(64, 64), (128, 96), (256, 256), (300, 200), (31, 33), (1000, 700), (1, 150)])
@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_patches_are_those_of_transformers_whether_or_not_the_image_is_resized(size: tuple[int, int], kind: str):
    content = encoded(picture(*size), kind)
    patches, grid_hw = reference(Image.open(io.BytesIO(content)).convert("RGB"), SMALL)
    made = cut(content, SMALL)
    assert made.layout.grid_thw == (1, *grid_hw) and np.array_equal(made.patches, patches)


def test_a_jpeg_that_is_not_much_too_large_is_cut_as_transformers_cuts_it():
    content = encoded(picture(500, 400, seed=3), "JPEG")
    patches, grid_hw = reference(Image.open(io.BytesIO(content)), SMALL)
    made = cut(content, SMALL)
    assert made.layout.grid_thw == (1, *grid_hw) and np.array_equal(made.patches, patches)


def test_a_jpeg_reduced_while_decoding_has_nearly_the_patches_of_transformers():
    small = picture(60, 40, seed=4)
    content = encoded(small.resize((1920, 1280), Image.Resampling.BICUBIC), "JPEG", quality=90)
    patches, grid_hw = reference(Image.open(io.BytesIO(content)), SMALL)
    made = cut(content, SMALL)
    assert made.layout.grid_thw == (1, *grid_hw)
    difference = np.abs(made.patches.astype(int) - patches)
    assert difference.mean() < 2 and not np.array_equal(made.patches, patches)


def test_the_hash_depends_on_the_resized_pixels_and_not_on_the_file_format():
    image = picture(64, 64)
    changed = image.copy()
    changed.putpixel((63, 63), (0, 0, 0))
    as_png, as_webp = encoded(image), encoded(image, "WEBP", lossless=True)
    assert cut(as_png, SMALL).content_hash == cut(as_webp, SMALL).content_hash
    assert cut(as_png, SMALL).content_hash != cut(encoded(changed), SMALL).content_hash
    assert cut(as_png, SMALL).content_hash != cut(as_png, SMALL.limited(2)).content_hash


@pytest.mark.parametrize("size", [(1, 20000), (20000, 1), (6368, 32)])
@pytest.mark.parametrize("most", [4, 64, 300])
def test_very_narrow_images_are_within_the_limit(most: int, size: tuple[int, int]):
    for grid in (QWEN3_VL, QWEN2_VL, SMALL, replace(QWEN2_VL, min_pixels=most * 28**2)):
        limited = grid.limited(most)
        assert limited.max_tokens <= most
        for one in (limited, limited.for_detail(True), grid.for_detail(True)):
            assert 0 < one.num_tokens(one.layout(*size)) <= one.max_tokens


def test_a_limit_of_tokens_reduces_the_largest_images_only():
    grid = QWEN3_VL.limited(100)
    assert (grid.max_tokens, QWEN3_VL.limited(10**6)) == (100, QWEN3_VL)
    for size in ((4032, 3024), (320, 320), (300, 10)):
        width, height = grid.target_size(*size)
        assert 0 < width * height // 32**2 <= 100
    assert grid.target_size(320, 320) == QWEN3_VL.target_size(320, 320) == (320, 320)
    tiny = QWEN3_VL.limited(4)
    assert tiny.target_size(2000, 2000) == tiny.target_size(10, 10) == (64, 64)
