"""The rope of GLM-4 (`glm`).

mlx_vlm 0.7.10 turns all dimensions of a head, where published checkpoints have `partial_rotary_factor` 0.5, which is
also what transformers takes without the field. Other factors are refused (`config_fields.py`). It can be removed when
the library reads the field.
"""

from typing import Any

import mlx.nn as nn
from mlx_vlm.models.glm.language import GLMAttention

_library_init: Any = GLMAttention.__init__


def _init(self: Any, args: Any) -> None:
    _library_init(self, args)
    self.rope = nn.RoPE(dims=self.head_dim // 2, traditional=True, base=args.rope_theta)


def install() -> None:
    """Replace the library's method. May be called several times."""
    GLMAttention.__init__ = _init
