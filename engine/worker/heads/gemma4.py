"""Gemma 4's assistants: a few small layers without keys and values, which attend to those of the target.

An assistant reads the embedding of the newest token beside the target's hidden state before it, and sees the keys and
values of the target's last layer of each kind. After a draft it reads its own state in the place of the target's; the
position stays that of the target's hidden state. The layers are the library's, and so is the choice of this position:
transformers takes that of the newest token.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.speculative.drafters.gemma4_assistant.config import Gemma4AssistantConfig
from mlx_vlm.speculative.drafters.gemma4_assistant.gemma4_assistant import Gemma4AssistantDraftModel
from mlx_vlm.speculative.drafters.gemma4_assistant.masked_embedder import MaskedEmbedder
from mlx_vlm.utils import load_model_weights

from engine.errors import EngineFailed
from engine.processing.checkpoint import read_config
from engine.worker.batch_layer import SeenSlots
from engine.worker.heads.gemma4_config import FULL, MODEL_TYPES, SLIDING, assistant_config, is_assistant
from engine.worker.heads.head import Head, SharingHead
from engine.worker.heads.head_files import check_fit, split_tensors
from engine.worker.heads.read_outputs import check_outputs
from engine.worker.kv_cache import SequenceCache
from engine.worker.language_model import LanguageModel, config_of
from engine.worker.layer_outputs import LastStates, layers_of

TARGETS = ("gemma4_text", "gemma4_unified_text")
"""model_type of the language models that are drafted for."""


class Gemma4Assistant(Gemma4AssistantDraftModel):
    """Implements Head and SharingHead.

    Args:
        config: Of the assistant.
        language_model: The library's language model of the target.
    """

    as_offset = False
    block = None
    model_path: Path

    def __init__(self, config: Gemma4AssistantConfig, language_model: Any):
        super().__init__(config)
        self.hidden_size = self.model.config.hidden_size
        kinds = dict.fromkeys(layer.layer_type for layer in self.model.layers)
        found = last_layers(language_model)
        self._kinds = tuple(kinds)
        self.shared_caches = tuple(found[kind] for kind in kinds)
        self.layer_outputs = LastStates(language_model)
        self._embed = LanguageModel(language_model).embed_for_layers

    @property
    def embed_tokens(self) -> Any:
        return self._embed

    @property
    def sharing(self) -> SharingHead:
        return self

    def make_cache(self) -> SequenceCache:
        return []

    def states(self, embeds: mx.array, hidden: mx.array, cache: list[SeenSlots], positions: mx.array) -> mx.array:
        seen = dict(zip(self._kinds, cache, strict=True))
        x = self.pre_projection(mx.concatenate([embeds, hidden], axis=-1))
        for layer in self.model.layers:
            slots = seen[layer.layer_type]
            x = layer(x, slots.seen, shared_kv=(slots.keys, slots.values), offset=positions[:, 0])[0]
        return self.model.norm(x)

    def next_hidden(self, states: mx.array) -> mx.array:
        return self.post_projection(states)

    def logits(self, states: mx.array) -> mx.array:
        if self.masked_embedding is None:
            return self.model.embed_tokens.as_linear(states)
        return _logits_of_clusters(self.masked_embedding, states, self.model.embed_tokens)


class Gemma4Format:
    """Implements HeadFormat."""

    split_types = MODEL_TYPES
    tensors = "Gemma 4 assistant"
    known_code = None

    def is_in(self, model_dir: Path) -> bool:
        return is_assistant(read_config(model_dir))

    def load(self, head_dir: Path, language_model: Any) -> Head:
        config = read_config(head_dir)
        if not is_assistant(config):
            raise EngineFailed(
                f"the MTP head in {head_dir}: model_type is {config.get('model_type')!r}, expected one of "
                f"{', '.join(MODEL_TYPES)}"
            )
        head_config = assistant_config(config, head_dir)
        _check_target(head_config, language_model, head_dir)
        head: Any = Gemma4Assistant(head_config, language_model)
        check_outputs("Gemma 4 assistant", head, head_config.backbone_hidden_size, language_model, head_dir)
        load_model_weights(head, config, head.sanitize(split_tensors(head_dir)), head_dir, lazy=True)
        return head

    def check_values(self, head: Any) -> None:
        """Check that the clusters of an assistant are a division of the vocabulary: reading beyond it is not checked.

        Raises:
            EngineFailed: A token is in no cluster, or in two.
        """
        if head.masked_embedding is None:
            return
        ordering = head.masked_embedding.token_ordering
        if not mx.array_equal(mx.sort(ordering), mx.arange(ordering.size)).item():
            raise EngineFailed(
                f"the Gemma 4 assistant in {head.model_path}: masked_embedding.token_ordering has not each of the "
                f"tokens 0 to {ordering.size - 1} once"
            )


GEMMA4 = Gemma4Format()
GEMMA4_FORMATS: dict[str, Gemma4Format] = dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), GEMMA4)
"""By the model_type of a checkpoint."""


def last_layers(language_model: Any) -> dict[str, int]:
    """Return the last layer of each kind that has keys and values of its own, which is also the number of its cache."""
    num_own = language_model.model.first_kv_shared_layer_idx
    return {kind: i for i, kind in enumerate(config_of(language_model).layer_types[:num_own])}


def _logits_of_clusters(embedder: MaskedEmbedder, states: mx.array, embedding: Any) -> mx.array:
    """Return logits [B, L, vocab] of the tokens of the best clusters; others are below the lowest of these by 1.

    Each position has a lowest logit of its own, so that no row depends on the others.
    """
    batch, length, _ = states.shape
    best = mx.argpartition(embedder.centroids(states), kth=-embedder.top_k, axis=-1)[..., -embedder.top_k :]
    tokens = embedder.token_ordering.reshape(embedder.num_centroids, -1)[best].reshape(batch, length, -1)
    known = (embedding(tokens) @ states[..., None])[..., 0]
    lowest = known.min(axis=-1, keepdims=True) - 1
    logits = mx.broadcast_to(lowest, (batch, length, embedder.vocab_size))
    return mx.put_along_axis(logits, tokens, known, axis=-1)


def _rope(parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"partial_rotary_factor": 1.0, "rope_type": "default"} | (parameters or {})


def _check_target(head: Gemma4AssistantConfig, language_model: Any, head_dir: Path) -> None:
    """Raise EngineFailed if an assistant was made for another target."""
    text: Any = head.text_config
    target = config_of(language_model)
    if target.model_type not in TARGETS:
        raise EngineFailed(
            f"the Gemma 4 assistant in {head_dir} cannot draft for this model: its model_type is "
            f"{target.model_type!r}, expected one of {', '.join(TARGETS)}"
        )
    found: dict[str, Any] = {"backbone_hidden_size": head.backbone_hidden_size, "vocab_size": text.vocab_size}
    expected: dict[str, Any] = {"backbone_hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    last = last_layers(language_model)
    for kind in dict.fromkeys(text.layer_types):
        if kind not in last:
            raise EngineFailed(
                f"the Gemma 4 assistant in {head_dir} does not fit the model: text_config.layer_types has {kind!r}, "
                "and the model has no such layer with keys and values of its own"
            )
        attention = layers_of(language_model)[last[kind]].self_attn
        if text.num_attention_heads % attention.n_kv_heads:
            raise EngineFailed(
                f"the Gemma 4 assistant in {head_dir} does not fit the model: text_config.num_attention_heads is "
                f"{text.num_attention_heads}, expected a multiple of {attention.n_kv_heads}, the heads with keys and "
                f"values of the model's {kind} layers"
            )
        size = "global_head_dim" if kind == FULL and text.global_head_dim else "head_dim"
        found[size], expected[size] = getattr(text, size), attention.head_dim
        rope = f"rope_parameters.{kind}"
        found[rope], expected[rope] = (_rope(one.rope_parameters.get(kind)) for one in (text, target))
        if kind == SLIDING:
            found["sliding_window"], expected["sliding_window"] = text.sliding_window, target.sliding_window
    check_fit(found, expected, head_dir)
