"""Sections of M-RoPE's frequencies without `mx.split`, which a compiled step cannot have twice.

mlx-vlm 0.7.10 splits cosines and sines of GLM-4V and PaddleOCR-VL in each layer, the same for all. Two splits of an
array that was multiplied by a number, as these are, make a function that MLX 0.32.4 has compiled raise "_Map_base::at".
So these families did not start on CUDA, where steps are compiled. It can be removed when `mx.compile` takes two such
splits, for which the test looks.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
from mlx_vlm.models import rope_utils

_library: Any = rope_utils._section_frequency_layout


def sections(values: mx.array, mrope_section: Sequence[int]) -> mx.array:
    """Return the values [B, 1, L, F] of each frequency's own axis.

    Args:
        values: Cosines or sines for time, height and width [3, B, L, F].
        mrope_section: Numbers of frequencies of the three axes, which the F frequencies go through twice.
    """
    if len(mrope_section) != 3:
        return _library(values, mrope_section)
    bounds = [*accumulate([*mrope_section, *mrope_section][:-1], initial=0), values.shape[-1]]
    pieces = [values[i % 3, ..., start:end] for i, (start, end) in enumerate(pairwise(bounds))]
    return mx.concatenate(pieces, axis=-1)[:, None, :, :]


def install() -> None:
    """Replace the library's function. May be called several times."""
    module: Any = rope_utils
    module._section_frequency_layout = sections
