"""Images to patches with the demo model's processor, compared with transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor

from engine.errors import EngineFailed, InvalidRequest
from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.images import ImagePreprocessor, normalize
from engine.processing.patch_normalization import PatchNormalization

SIZES = [(64, 64), (200, 100), (1000, 30), (31, 33), (1, 1), (1, 150), (700, 900)]


@pytest.fixture(scope="module")
def preprocessor() -> ImagePreprocessor:
    return ImagePreprocessor(DEMO_MODEL)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drawn(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("size", SIZES)
def test_normalised_patches_equal_those_of_the_models_processor(preprocessor: ImagePreprocessor, size: tuple[int, int]):
    image = drawn(*size)
    expected = AutoImageProcessor.from_pretrained(str(DEMO_MODEL), backend="pil")(images=[image], return_tensors="np")
    made = preprocessor.patches(image)
    assert made.grid_thw == tuple(expected["image_grid_thw"][0])
    pixel_values = normalize(made.patches, preprocessor.normalization)
    assert pixel_values.dtype == np.float32 and pixel_values.shape == expected["pixel_values"].shape
    np.testing.assert_allclose(pixel_values, expected["pixel_values"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_patches_are_bytes_and_their_number_fits_the_grid(preprocessor: ImagePreprocessor, size: tuple[int, int]):
    made = preprocessor.patches(drawn(*size))
    t, h, w = made.grid_thw
    assert made.patches.dtype == np.uint8 and made.patches.flags.c_contiguous
    assert made.patches.shape == (t * h * w, 3, 16, 16)
    assert made.num_tokens == t * h * w // 4
    assert 4 <= made.num_tokens <= 64  # the model's own limits: 4096 to 65536 pixels


def test_the_order_of_patches_keeps_merged_ones_together(preprocessor: ImagePreprocessor):
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    pixels[:32, 32:] = 200  # the upper right quarter: the second block of 2 x 2 patches
    made = preprocessor.patches(Image.fromarray(pixels))
    assert (made.patches.reshape(16, -1).mean(axis=1) == [0] * 4 + [200] * 4 + [0] * 8).all()


def test_the_normalization_is_that_of_the_checkpoint(preprocessor: ImagePreprocessor, model_dir: Path):
    assert preprocessor.normalization == PatchNormalization((0.5,) * 3, (0.5,) * 3, 1 / 255, 2)
    edit(model_dir / "preprocessor_config.json", do_normalize=False, image_mean=[0.1, 0.2, 0.3])
    assert ImagePreprocessor(model_dir).normalization.mean == (0, 0, 0)


def test_an_image_with_an_extreme_aspect_ratio_is_refused(preprocessor: ImagePreprocessor):
    with pytest.raises(InvalidRequest, match="201 x 1 pixels; the longer side may be at most 200 times the other"):
        preprocessor.patches(drawn(201, 1))


def test_a_processor_of_another_family_is_refused(model_dir: Path):
    assert ImagePreprocessor.supported(model_dir)
    edit(model_dir / "preprocessor_config.json", image_processor_type="SiglipImageProcessor")
    assert not ImagePreprocessor.supported(model_dir)
    with pytest.raises(EngineFailed, match="the image processor is SiglipImageProcessor; supported are Qwen2VL"):
        ImagePreprocessor(model_dir)


def test_a_converted_checkpoint_cuts_images_like_its_original(preprocessor: ImagePreprocessor, model_dir: Path):
    """mlx-vlm saves its own class's name, and the limits under other names, in another file."""
    original = json.loads((model_dir / "preprocessor_config.json").read_text())
    (model_dir / "preprocessor_config.json").unlink()
    kept = {
        key: original[key] for key in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    }
    converted = {"image_processor_type": "Qwen3VLImageProcessor", "min_pixels": 4096, "max_pixels": 65536, **kept}
    (model_dir / "processor_config.json").write_text(json.dumps({"image_processor": converted}))
    image = drawn(300, 200)
    ours, expected = ImagePreprocessor(model_dir).patches(image), preprocessor.patches(image)
    assert ours.grid_thw == expected.grid_thw
    assert np.array_equal(ours.patches, expected.patches)
