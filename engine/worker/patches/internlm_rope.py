"""The rope of InternLM2 and InternLM3.

mlx_vlm 0.7.10 multiplies their positions by 2 where config.json has no rope scaling: it takes the factor of the dynamic
scaling, which only counts beyond the trained context, for one of positions. It also changes the base at the end of that
context, where the engine's contexts end, for keys that are in the cache with another, and takes no offsets [B]. It can
be removed when the library's rope is that of mlx_lm 0.32.2, `initialize_rope`.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.internlm2.language import DynamicNTKScalingRoPE as InternLM2RoPE
from mlx_vlm.models.internlm3.language import DynamicNTKScalingRoPE as InternLM3RoPE

LIBRARY: dict[Any, Any] = {rope: rope.__call__ for rope in (InternLM2RoPE, InternLM3RoPE)}
"""The library's ropes, by class."""


def _rope(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
    scale = min(self.scale, 1.0)  # less than 1 with linear scaling
    return mx.fast.rope(x, self.dims, traditional=self.traditional, base=self.original_base, scale=scale, offset=offset)


def install() -> None:
    """Replace the library's methods. May be called several times."""
    for rope in LIBRARY:
        rope.__call__ = _rope
