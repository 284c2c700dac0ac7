"""The windows of MiMo-V2-Flash.

`sliding_window_size` counts the tokens before a token, which attends to itself as well: transformers adds one.
mlx_vlm 0.7.10 takes it for the whole window. It can be removed when the library adds one.
"""

from functools import wraps
from typing import Any

from mlx_vlm.models.mimo_v2_flash.config import ModelConfig

_library_init: Any = ModelConfig.__init__


@wraps(_library_init)  # the library reads the names of its arguments
def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    _library_init(self, *args, **kwargs)
    self.sliding_window_size += 1


def install() -> None:
    """Replace the library's method. May be called several times."""
    ModelConfig.__init__ = _init
