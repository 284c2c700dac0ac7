"""The gated delta rule over a prompt on the CPU, in chunks that suit its length.

mlx_vlm 0.7.10 always uses chunks of 64 tokens: a prompt's last two tokens cost as much as 64, and each chunk a forward
substitution of 64 steps. On two CPU cores a layer of the demo model takes 12, 13, 36 and 63 ms for 2, 32, 256 and 2048
tokens; with the chunks chosen here 1, 3, 7 and 48. It can be removed when the library chooses by itself.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.qwen3_5 import gated_delta

CHUNKS = ((64, 8), (1024, 16))
"""(largest number of tokens, tokens per chunk)."""
LONGEST_CHUNK = 32

_library = gated_delta.gated_delta_chunked


def chunk_tokens(length: int) -> int:
    """Return the chunk size for a prompt of `length` tokens."""
    return next((size for limit, size in CHUNKS if length <= limit), LONGEST_CHUNK)


def _gated_delta_chunked(q: mx.array, *args: Any, **kwargs: Any) -> tuple[mx.array, mx.array]:
    return _library(q, *args, C=chunk_tokens(q.shape[1]), **kwargs)


def install() -> None:
    """Replace the library's function. May be called several times."""
    gated_delta.gated_delta_chunked = _gated_delta_chunked
