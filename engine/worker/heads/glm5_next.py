"""The head of GLM-5-Next, the layer after the last one: sparse attention and experts, without hyper-connections."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.speculative.drafters.glm5_next_mtp import Glm5NextMTPDraftModel, ModelConfig
from mlx_vlm.speculative.drafters.glm5_next_mtp.split import Glm5NextMTPSplitter

from engine.worker.heads.head import SharesTarget
from engine.worker.heads.library import LibraryFormat
from engine.worker.kv_cache import SequenceCache
from engine.worker.language_model import config_of
from engine.worker.layer_caches import as_taken, row_caches
from engine.worker.patches.glm5_next_rows import kept_caches


class Glm5NextHead(SharesTarget, Glm5NextMTPDraftModel):
    """Implements Head.

    Args:
        language_model: The library's language model of the target, whose configuration is the head's too.
    """

    as_offset = True
    model_path: Path

    def __init__(self, language_model: Any):
        args = config_of(language_model)
        super().__init__(ModelConfig(text_config=args))
        self.hidden_size = args.hidden_size
        self._may_cast = language_model.cast_predicate

    @property
    def cast_predicate(self):
        return lambda name: self._may_cast(f"mtp.{name}")

    def make_cache(self) -> SequenceCache:  # type: ignore[override]
        return row_caches(self._library_layers())

    def _library_layers(self) -> list[Any]:
        """Return empty caches of the library, for their classes."""
        return kept_caches(super().make_cache())

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        embeds = mx.where(positions[..., None] == 0, 0, embeds)  # the library's head does not read the first token
        pair = [self.enorm(embeds), self.hnorm(hidden)]
        [own] = as_taken(self._library_layers(), iter(cache))
        return self.shared_head_norm(self.mtp_block(self.eh_proj(mx.concatenate(pair, axis=-1)), own))


GLM5_NEXT = LibraryFormat(
    "glm5_next",
    Glm5NextMTPSplitter,
    Glm5NextHead,
    "layers.<num_hidden_layers>.*",
    ("mtp_block.embed_tokens.", "mtp_block.shared_head.head."),
)
