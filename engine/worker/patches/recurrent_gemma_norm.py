"""The epsilon of RecurrentGemma's norms.

mlx_vlm 0.7.10 gives `rms_norm_eps` to the last norm alone and computes those of the layers with 1e-5, where the
published checkpoints have 1e-6. It can be removed when the library's layers take it.
"""

from typing import Any

from mlx_vlm.models.recurrent_gemma.language import Griffin

_library_init: Any = Griffin.__init__


def _init(self: Any, config: Any) -> None:
    _library_init(self, config)
    for layer in self.layers:
        layer.temporal_pre_norm.eps = layer.channel_pre_norm.eps = config.rms_norm_eps


def install() -> None:
    """Replace the library's method. May be called several times."""
    Griffin.__init__ = _init
