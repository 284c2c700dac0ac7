"""The GELU of Llama 4's vision tower and of the adapter behind it, which is exact, as transformers computes it.

mlx_vlm 0.7.10 (models/llama4/vision.py) approximates it by a sigmoid. It can be removed when the library does not.
"""

from typing import Any

import mlx.nn as nn
from mlx_vlm.models.llama4.vision import Llama4VisionMLP

library_init: Any = Llama4VisionMLP.__init__


def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    library_init(self, *args, **kwargs)
    self.activation_fn = nn.GELU()


def install() -> None:
    """Replace the library's method. May be called several times."""
    Llama4VisionMLP.__init__ = _init
