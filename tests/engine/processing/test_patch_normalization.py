"""The normalization that is read from a checkpoint is the one of transformers' own processor."""

from typing import Any

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.errors import EngineFailed
from engine.processing.patch_normalization import PatchNormalization


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.1, 0.2, 0.3], "merge_size": 4, "temporal_patch_size": 1},
        {"do_normalize": False, "image_mean": [0.5, 0.5, 0.5]},
        {"do_rescale": False},
        {"rescale_factor": 0.5, "image_mean": 0.25},
    ],
)
def test_the_normalization_equals_that_of_the_library(config: dict[str, Any]):
    library: Any = Qwen2VLImageProcessorPil(**config)
    ours = PatchNormalization.of(config)

    def per_channel(value: Any) -> tuple[float, ...]:
        return (value,) * 3 if isinstance(value, float) else tuple(value)

    assert ours.mean == (per_channel(library.image_mean) if library.do_normalize else (0.0,) * 3)
    assert ours.std == (per_channel(library.image_std) if library.do_normalize else (1.0,) * 3)
    assert ours.rescale == (library.rescale_factor if library.do_rescale else 1.0)
    assert ours.temporal_patch_size == library.temporal_patch_size


def test_a_null_setting_means_the_default():
    assert PatchNormalization.of({"image_mean": None, "rescale_factor": None}) == PatchNormalization.of({})


def test_a_value_that_is_no_number_is_refused():
    with pytest.raises(EngineFailed, match="not a number"):
        PatchNormalization.of({"image_mean": ["bright"]})
