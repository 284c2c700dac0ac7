"""The GELU and the norms of Kimi-VL's and Kimi K2.5's vision towers, as their authors and transformers compute them.

mlx_vlm 0.7.10 (models/kimi_vl/vision.py and models/kimi_k25/vision.py) has the exact GELU, where the towers have its
tanh approximation, and norms with an epsilon of 1e-6 instead of 1e-5. It can be removed when the library has neither.
"""

from collections.abc import Callable
from typing import Any

import mlx.nn as nn
from mlx_vlm.models.kimi_k25 import vision as kimi_k25
from mlx_vlm.models.kimi_vl import vision as kimi_vl

EPSILON = 1e-5


def _set_gelu(mlp: Any) -> None:
    mlp.activation_fn = nn.gelu_approx


def _set_block_norms(block: Any) -> None:
    block.norm0.eps = block.norm1.eps = EPSILON


def _set_last_norm(tower: Any) -> None:
    tower.final_layernorm.eps = EPSILON


CORRECTIONS: dict[Any, Callable[[Any], None]] = {
    cls: correct
    for module in (kimi_vl, kimi_k25)
    for cls, correct in (
        (module.MLP, _set_gelu),
        (module.Qwen2VLVisionBlock, _set_block_norms),
        (module.VisionModel, _set_last_norm),
    )
}
"""By class: changes a new instance."""

LIBRARY: dict[Any, Any] = {cls: cls.__init__ for cls in CORRECTIONS}
"""The library's methods, by class."""


def _corrected(cls: Any) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        LIBRARY[cls](self, *args, **kwargs)
        CORRECTIONS[cls](self)

    return init


def install() -> None:
    """Replace the library's methods. May be called several times."""
    for cls in CORRECTIONS:
        cls.__init__ = _corrected(cls)
