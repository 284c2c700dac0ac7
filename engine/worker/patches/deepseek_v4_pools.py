"""DeepSeek V4's pools of a prompt in pieces, its choice among many entries, and several tokens of a decode group.

mlx_vlm 0.7.10 makes an entry of overlapping windows as if each piece of a prompt, and each decoded token, began the
context: nothing of the window before is left. Here it is kept, as transformers does. From 1024 entries on the library
chooses entries only from the blocks of 64 whose means score best, other ones for one token than for several; here all
entries are scored. Up to 8 tokens are attended to one after the other, each written where the first belongs; here they
are attended to at once. All three can be removed as the tests beside this file say.
"""

from typing import Any

import mlx.core as mx
from mlx_vlm.models.deepseek_v4.language import Compressor, Indexer, LocalAttention

LIBRARY: dict[str, Any] = {
    "compress": Compressor.__call__,
    "make_index": Indexer.__init__,
    "attend": LocalAttention.__call__,
}
"""The library's methods."""


def _compress(self: Any, x: mx.array, pool_cache: Any, offset: int | mx.array) -> mx.array:
    """Add new tokens [B, L, hidden] to a pool; return its entries [B, n, head_dim]."""
    if pool_cache is None:
        return LIBRARY["compress"](self, x, None, offset)
    ratio = self.compress_ratio
    kv, gate, position = pool_cache.accumulate_windows(self.wkv(x), self.wgate(x), offset)
    if kv.shape[1] == 0:
        return pool_cache.update_and_fetch(mx.zeros((len(kv), 0, self.head_dim), x.dtype))
    if self.overlap:
        before = getattr(pool_cache, "before", None)
        before = before or (mx.zeros_like(kv[:, :ratio]), mx.full((len(kv), ratio, kv.shape[2]), -mx.inf, gate.dtype))
        pool_cache.before = kv[:, -ratio:], gate[:, -ratio:]  # read again only with the library's cache
        kv, gate = (mx.concatenate([one, new], axis=1) for one, new in zip(before, (kv, gate), strict=True))
    kv, gate = (mx.unflatten(one, 1, (-1, ratio)) for one in (kv, gate))
    gate = gate.astype(mx.float32) + self.ape
    if self.overlap:
        kv, gate = (
            mx.concatenate([one[:, :-1, :, : self.head_dim], one[:, 1:, :, self.head_dim :]], axis=2)
            for one in (kv, gate)
        )
    entries = (kv * mx.softmax(gate, axis=-2).astype(kv.dtype)).sum(axis=-2)
    return pool_cache.update_and_fetch(self.rope(self.norm(entries)[:, None], offset=position).squeeze(1))


def _make_index(self: Any, config: Any, compress_ratio: int) -> None:
    LIBRARY["make_index"](self, config, compress_ratio)
    self.index_block = 0


def _attend(
    self: Any, x: mx.array, mask: Any = None, cache: Any = None, position_offset: Any = None, causal: bool = False
) -> mx.array:
    return LIBRARY["attend"](self, x, mask, cache, position_offset)


def install() -> None:
    """Replace the library's methods. May be called several times."""
    Compressor.__call__ = _compress
    Indexer.__init__ = _make_index
    LocalAttention.__call__ = _attend
