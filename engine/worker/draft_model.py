"""A separate small model with the target's tokenizer as the proposer of draft tokens.

It drafts as a head does (worker/drafting_head.py), but reads tokens alone. A head reads the pairs (token p + 1, hidden
state p), so that its cache has one entry less than there are tokens; a draft model reads every token, the first one
included.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import draft_of
from engine.processing.tokenizer_match import why_different
from engine.worker.draft_block import DraftBlock
from engine.worker.drafter import DraftingModel
from engine.worker.heads.head import SharingHead
from engine.worker.kv_cache import SequenceCache
from engine.worker.language_model import LanguageModel
from engine.worker.layer_kinds import keeps_all
from engine.worker.loaded_model import FoundProposer, OpenedModel
from engine.worker.proposer import ModelProposer, Target
from engine.worker.weights import DTYPES, cast, is_quantized

LOWEST = -1e9  # logit of tokens that the draft model's output layer lacks


LENGTHS = (1, 2, 3)
"""Draft tokens per row that `auto` chooses from."""

log = logging.getLogger("orchard.engine")


class SeparateModel(ModelProposer):
    """Implements Proposer."""

    name = "draft_model"
    off_reason = "no draft_model is configured"
    label = "draft model"
    replaces_others = True

    def asked_for(self, config: EngineConfig) -> tuple[str, ...]:
        return () if config.draft_model is None else (self.name,)

    def load(
        self,
        config: EngineConfig,
        found: FoundProposer,
        target: OpenedModel,
        opening: Callable[[EngineConfig], OpenedModel],
    ) -> FoundProposer:
        """Open the draft model as a target is opened."""
        assert config.draft_model is not None
        name = config.draft_model.model
        settings = EngineConfig(
            model=draft_of(name),
            revision=config.draft_model.revision,
            device=config.device,
            dtype=config.dtype,
            expand_quantized_weights=config.expand_quantized_weights,
            mtp="off",
        )
        try:
            opened = opening(settings)
        except EngineFailed as error:
            raise EngineFailed(f"draft_model {name!r}: {error}") from error
        named = f"draft_model {name!r} ({opened.path})"
        if (difference := why_different(target.path, opened.path)) is not None:
            raise EngineFailed(f"{named} has another tokenizer than the model: {difference}")
        if (reason := draft_unsupported_reason(LanguageModel(opened.module.language_model))) is not None:
            raise EngineFailed(f"{named}: models of the family {opened.config['model_type']} cannot draft: {reason}")
        if opened.max_context_tokens < target.max_context_tokens:
            log.warning(
                "%s was trained for %d tokens, the model takes %d: beyond that few drafts may be accepted",
                named, opened.max_context_tokens, target.max_context_tokens,
            )  # fmt: skip
        if not is_quantized(opened.module):
            cast(opened.module, DTYPES[target.dtype])
        log.info("quantized weights of the draft model: %s", opened.expansion.text)
        return replace(found, module=opened.module.eval(), path=opened.path)

    def drafting_model(self, module: Any, target: Target) -> DraftingModel:
        return DraftModel(module, target.vocab_size, target.num_embeddings)

    def lengths(self, model: DraftingModel, target: Target) -> Sequence[int]:
        return LENGTHS


class DraftModel:
    """Predicts the token after each token. Implements drafter.DraftingModel.

    Args:
        module: The library's model.
        vocab_size: Number of logits of the target, to which its own are cut or extended.
        num_embeddings: Of the target, whose prompts may have every token id below it.
    """

    lead = 1
    block: DraftBlock | None = None
    sharing: SharingHead | None = None

    def __init__(self, module: Any, vocab_size: int, num_embeddings: int):
        self._language_model = LanguageModel(module.language_model)
        self.as_offset = not self._language_model.explicit_positions
        self._vocab_size = vocab_size
        own = self._language_model.num_embeddings
        self._last_known = own - 1 if own < num_embeddings else None

    def make_cache(self) -> SequenceCache:
        """Return an empty cache for one row."""
        return self._language_model.make_cache()

    def begin(self, first_token_id: int, cache: SequenceCache) -> None:
        """Read the first token of a prompt into an empty cache."""
        self._extend(mx.array([[first_token_id]], mx.int32), cache)

    def prime(self, next_token_ids: mx.array, hidden: mx.array, cache: SequenceCache) -> None:
        """Launch a chunk of one prompt, see DraftingHead.prime."""
        self._extend(next_token_ids, cache)

    def _extend(self, token_ids: mx.array, cache: SequenceCache) -> None:
        start = cache[0].offset
        positions = np.arange(start, start + token_ids.shape[1], dtype=np.int32)
        self._language_model.extend(
            self._known(token_ids), None, cache, np.broadcast_to(positions, (3, 1, len(positions)))
        )

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: list[Any], positions: mx.array) -> mx.array:
        """Compute hidden states [B, L, hidden] for `logits`; see DraftingHead."""
        return self._language_model.states(self._known(token_ids), cache, positions)

    def _known(self, token_ids: mx.array) -> mx.array:
        """Replace ids that only the target has an embedding for: reading beyond the array is not checked."""
        return token_ids if self._last_known is None else mx.minimum(token_ids, self._last_known)

    def logits(self, hidden: mx.array) -> mx.array:
        """Apply the output layer: [B, L, hidden] -> [B, L, vocab of the target]."""
        logits = self._language_model.logits(hidden)
        missing = self._vocab_size - logits.shape[-1]
        if missing > 0:
            return mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=LOWEST)
        return logits[..., : self._vocab_size]

    def read(self, hidden: mx.array | None, token_ids: mx.array) -> mx.array:
        """Return a placeholder [B, L, 1] for the target's hidden states, which a draft model does not read."""
        return mx.zeros((*token_ids.shape, 1), mx.float32)


def draft_unsupported_reason(language_model: LanguageModel) -> str | None:
    """Return why a model cannot draft, None if it can."""
    for i, layer in enumerate(language_model.make_cache()):
        if not keeps_all(layer):
            return f"layer {i} keeps its state in a {type(layer).__name__}; attention without windows is supported"
    try:
        _ = language_model.num_embeddings
    except EngineFailed as error:
        return str(error)
    return language_model.states_unsupported_reason()
