"""Metal's kernel that rotates by given cosines gets only those of the rotated tokens.

mlx-vlm 0.7.10 calls it whatever their shape, and it reads them as [.., B, L, head_dim], so beyond the end of those for
fewer rows or tokens. The plain operations broadcast them or raise an error, by which `LanguageModel.explicit_positions`
tells families with one rope position per token. ERNIE 4.5 VL raised none on a Mac's GPU, was given three positions per
token, and all its logits were NaN. It can be removed when the library compares the shapes in
`_maybe_fast_precomputed_rotary` of models/rope_utils.py.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models import rope_utils

_library: Any = rope_utils._maybe_fast_precomputed_rotary


def _fast(q: mx.array, k: mx.array, cos: mx.array, sin: mx.array, **options: Any) -> Any:
    """Return q and k [B, heads, L, head_dim] rotated by the kernel; None for the plain operations."""
    are_of_tokens = q.ndim == 4 and all(x.shape[-3:-1] == (q.shape[0], q.shape[2]) for x in (cos, sin))
    return _library(q, k, cos, sin, **options) if are_of_tokens else None


def install() -> None:
    """Replace the library's function. May be called several times."""
    module: Any = rope_utils
    module._maybe_fast_precomputed_rotary = _fast
