"""No Metal kernels on the CPU device of a Mac.

mlx-vlm 0.7.10 builds them wherever Metal exists (`_HAS_METAL` of models/rope_utils.py and models/kernels.py), and MLX
refuses on the CPU: "[metal_kernel] Only supports the GPU." Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 could not be
loaded there. It can be removed when the library asks for the default device instead, as in models/gated_delta.py.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models import kernels, rope_utils

MODULES: tuple[Any, ...] = (rope_utils, kernels)


def install() -> None:
    """Make models that are built from now on use the library's plain operations, if the default device is the CPU."""
    has_kernels = mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu
    for module in MODULES:
        module._HAS_METAL = has_kernels
