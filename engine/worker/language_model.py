"""The language model as the runner uses it: one forward, with explicit positions where the model takes them."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import make_prompt_cache

from engine.config import MTPExact
from engine.errors import EngineFailed
from engine.worker.image_chunk import ImageChunk, masked
from engine.worker.kv_cache import SequenceCache
from engine.worker.layer_caches import as_taken, kv_formats, row_caches
from engine.worker.layer_outputs import ModuleOutputs
from engine.worker.quantized_kv import UNQUANTIZED_BITS, KVFormat, QuantizedKVCache

EMBEDDINGS = ("embed_tokens", "embeddings", "wte")
"""Names of the embedding in the library's modules."""
EMBEDDING_TABLES = ("weight", "embedding", "new_embedding")
"""Names of its tables, of which Molmo2 has two; the first token ids are those of the first table."""

Select = Callable[[mx.array], mx.array]
"""Hidden states [B, L, hidden] -> those of the selected positions, [E, 1, hidden]."""


class SelectedPositions:
    """Stands for the library's language model; its output layer sees only some positions of the hidden states.

    A family's `__call__`, run on it, computes what comes before the layers and after them as ever: scaled embeddings,
    soft caps and scales of the logits.

    Args:
        language_model: The library's module, which is not changed.
        select: Chooses the positions.
    """

    def __init__(self, language_model: Any, select: Select):
        self._language_model = language_model
        names = [name for name in ("model", "backbone", "transformer") if hasattr(language_model, name)]
        for name in names:
            setattr(self, name, _SelectedStates(getattr(language_model, name), self._once))
        if hasattr(language_model, "lm_head"):
            self.lm_head = lambda hidden: language_model.lm_head(self._once(hidden))
        self._select: Select | None = select

    def _once(self, hidden: mx.array) -> mx.array:
        """Select the positions, unless that is done: some families run the layers themselves."""
        select, self._select = self._select, None
        return hidden if select is None else select(hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._language_model, name)

    def __contains__(self, name: str) -> bool:
        return name in self._language_model


class _SelectedStates:
    """Stands for the module with the layers, all of the language model but its output layer."""

    def __init__(self, layers: Any, select: Select):
        self._layers = layers
        self._select = select

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._select(self._layers(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers, name)


OTHER_VERIFIERS = ("_batch_invariant_decode", "_speculative_verify_hidden", "speculative_verify_dflash_hidden")
"""Methods of families whose exact verifier is not used: Qwen4's returns the hidden states before the last mixer, that
of HY V4 computes drafts one by one, that of Nemotron-H overwrites recurrent states."""


def config_of(language_model: Any) -> Any:
    """Return the configuration of the library's language model, by the name that the family gives it."""
    found = getattr(language_model, "args", None) or getattr(language_model, "config", None)
    return found or language_model.model.config


NO_EXACT_VERIFIER = "no exact verifier"
"""Why a model cannot have `mtp_exact: on`: drafts are verified by the kernels for several tokens, which round in
another way than those for one."""


class LanguageModel:
    """Runs the module of the loaded model; has no weights and no state of its own.

    Models with multimodal rope (`get_rope_index`) keep positions in module state unless they are given, which would mix
    up rows; they always get explicit positions here. Text ports take positions from their cache, which is right for
    dense prompts. `capture_layer_ids=[]` captures no layer's output, and keeps the library from copying the whole cache
    of a single-row batch on every token (mlx_vlm 0.7.10, models/qwen3_5/language.py).

    Args:
        language_model: The library's module.
        exact: `mtp_exact` of the configuration.
        kv_bits: `kv_cache.bits` of the configuration.
        reads: What each head reads: outputs of modules, or None for the hidden states of which logits are made. These
            are returned without a head too, if positions are explicit.
    """

    def __init__(
        self,
        language_model: Any,
        exact: MTPExact = "auto",
        kv_bits: int = UNQUANTIZED_BITS,
        reads: Sequence[ModuleOutputs | None] = (),
    ):
        self.lm = language_model
        self.kv_bits = kv_bits
        self.exact: MTPExact = exact
        self._reads = tuple(reads)
        self._returns_hidden = hasattr(language_model, "speculative_logits_from_hidden") and not any(
            hasattr(language_model, name) for name in OTHER_VERIFIERS
        )

    @cached_property
    def explicit_positions(self) -> bool:
        """Whether the model takes three rope positions per token. Computes nothing."""
        if not hasattr(self.lm, "get_rope_index"):
            return False
        positions = mx.zeros((3, 1, 2), mx.int32)
        try:
            self.lm.model(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(self.lm), position_ids=positions)
        except ValueError:
            return False  # one position per token
        return True

    @property
    def has_exact_verifier(self) -> bool:
        return self._wants_hidden and self._returns_hidden and not any(self._reads)

    def _read(self, hidden: mx.array | None = None) -> mx.array | None:
        """Return what heads read of the last forward, whose hidden states after the last norm are given."""
        if not self._reads:
            return hidden
        parts = self._parts(hidden)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _parts(self, hidden: mx.array | None) -> list[mx.array]:
        parts = [hidden if one is None else one.take() for one in self._reads]
        return [part for part in parts if part is not None]

    @cached_property
    def parts_read(self) -> list[tuple[int, mx.Dtype]]:
        """Values that each head reads of a token, and their dtype, in the order of `reads`. Computes nothing."""
        token, where = mx.zeros((1, 1), mx.int32), np.zeros((3, 1, 1), np.int32)
        hidden = self._extend(token, None, self.make_cache(), where, launch=False)
        return [(part.shape[-1], part.dtype) for part in self._parts(hidden)]

    @property
    def _wants_hidden(self) -> bool:
        return self.explicit_positions or None in self._reads

    def _flat(self, positions: np.ndarray | mx.array) -> dict[str, Any]:
        """Return the argument [B, L] of a model with one position per token that would otherwise keep its own."""
        if not hasattr(self.lm, "get_rope_index"):
            return {}
        return {"position_ids": mx.array(positions[0] if positions.ndim == 3 else positions)}

    @property
    def args(self) -> Any:
        """The text model's configuration."""
        return config_of(self.lm)

    def verifies_exactly(self, num_rows: int) -> bool:
        """Return whether drafts of `num_rows` rows are verified by the library's exact verifier.

        In low precision Metal's kernels for several tokens round differently from those for one. The verifier uses the
        latter and reads quantized weights once per row. On other devices it is slower even for one row.
        """
        if not self.has_exact_verifier:
            return False
        if self.exact == "auto":
            on_metal = mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu
            return on_metal and num_rows == 1
        return self.exact == "on"

    def make_cache(self) -> SequenceCache:
        """Return an empty cache for one row; a layer with several caches has one entry for each.

        Raises:
            ValueError: Keys and values cannot be stored with `kv_bits`.
        """
        cache = self._unquantized_cache()
        if self.kv_bits == UNQUANTIZED_BITS:
            return cache
        pairs = zip(cache, self.kv_formats, strict=True)
        return [layer if kv_format is None else QuantizedKVCache(kv_format) for layer, kv_format in pairs]

    @cached_property
    def kv_formats(self) -> list[KVFormat | None]:
        """How each cache of a row packs its keys and values; see `make_cache`."""
        cache = self._unquantized_cache()
        if self.kv_bits == UNQUANTIZED_BITS:
            return [None] * len(cache)
        self.extend(mx.zeros((1, 1), mx.int32), None, cache, np.zeros((3, 1, 1), np.int32), launch=False)
        return kv_formats(cache, self.kv_bits)

    def _unquantized_cache(self) -> SequenceCache:
        return row_caches(make_prompt_cache(self.lm))

    @cached_property
    def _library_layers(self) -> list[Any]:
        """Empty caches of the library, for their classes."""
        return make_prompt_cache(self.lm)

    def _nested(self, cache: list) -> list:
        """Return the caches as the model's layers take them."""
        return as_taken(self._library_layers, iter(cache))

    def embed(self, token_ids: mx.array) -> mx.array:
        """Embed tokens: [B, L] -> [B, L, hidden]."""
        return self._embedding(token_ids)

    def embed_for_layers(self, token_ids: mx.array) -> mx.array:
        """Embed tokens as the layers take them beside image features. Those of Gemma 4 scale only what they embed."""
        embeds, scale = self.embed(token_ids), getattr(self._embedder, "embed_scale", None)
        return embeds if scale is None else embeds * scale

    def per_layer_inputs(self, token_ids: mx.array, places: np.ndarray) -> mx.array | None:
        """Return what each layer of Gemma 4's small models reads of tokens [1, L]; None for other models.

        Image tokens are padding there, as in both libraries.

        Args:
            token_ids: int32 [1, L].
            places: Where the image tokens are.
        """
        layers = self._embedder
        if not getattr(layers, "hidden_size_per_layer_input", 0):
            return None
        is_image = np.zeros((1, token_ids.shape[1]), bool)
        is_image[0, places] = True
        return layers.get_per_layer_inputs(mx.where(mx.array(is_image), layers.config.pad_token_id, token_ids))

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that have an embedding. Raises EngineFailed if the tables have unknown names."""
        embedding = self._embedding
        tables = [embedding[name] for name in EMBEDDING_TABLES if name in embedding]
        if not tables:
            raise EngineFailed(
                f"the embedding is a {type(embedding).__name__} with {', '.join(embedding) or 'no arrays'}; "
                f"its table must have one of the names {', '.join(EMBEDDING_TABLES)}"
            )
        return sum(len(table) for table in tables)

    @property
    def _embedder(self) -> Any:
        """The module that embeds tokens: mostly that with the layers."""
        return getattr(self.lm, "model", getattr(self.lm, "backbone", self.lm))

    @property
    def _embedding(self) -> Any:
        layers = self._embedder
        found = next((getattr(layers, name) for name in EMBEDDINGS if hasattr(layers, name)), None)
        if found is None:
            raise EngineFailed(
                f"{type(layers).__name__} has no embedding by a name that is known; known are {', '.join(EMBEDDINGS)}"
            )
        return found

    @property
    def _layers(self) -> Any:
        """The module with the layers, all of the language model but its output layer."""
        return self.lm.model if hasattr(self.lm, "model") else self.lm.backbone

    def decode(self, token_ids: mx.array, cache: list, positions: mx.array) -> tuple[mx.array, mx.array | None]:
        """Compute tokens of a decode group.

        Args:
            token_ids: int32 [B, L].
            cache: The group's layers.
            positions: int32 [B, L], logical.

        Returns:
            Logits [B, L, vocab], and what heads read, beside each other: hidden states [B, L, hidden] after the last
            norm, or the outputs of several layers; None without a head or explicit positions.
        """
        if not self._wants_hidden:
            logits = self.lm(token_ids, cache=self._nested(cache), **self._flat(positions)).logits
            return logits, self._read()
        if token_ids.shape[1] > 1 and self.verifies_exactly(token_ids.shape[0]):
            hidden = self._hidden(token_ids, cache, positions, speculative_verify=True)
            return self.lm.speculative_logits_from_hidden(hidden), hidden
        hidden = self._states(token_ids, cache, positions)
        return self.logits(hidden), self._read(hidden)

    def logits(self, hidden: mx.array) -> mx.array:
        """Apply the output layer: [B, L, hidden] -> [B, L, vocab], in one product for all rows and tokens."""
        layer = self.output_layer
        return layer(hidden) if hasattr(self.lm, "lm_head") else layer.as_linear(hidden)

    @property
    def output_layer(self) -> Any:
        """The layer that makes logits of hidden states: a linear one, or the embedding."""
        return self.lm.lm_head if hasattr(self.lm, "lm_head") else self._embedding

    def extend(
        self,
        token_ids: mx.array,
        chunk: ImageChunk | None,
        cache: list,
        positions: np.ndarray,
        launch: bool = True,
    ) -> mx.array | None:
        """Launch prompt tokens into the caches of one row or, in a burst, of several.

        The caller must wait for the device before the next chunk, which would otherwise copy arrays that are still in
        use.

        Args:
            token_ids: int32 [B, L].
            chunk: The same tokens, if there are images among them; for one row.
            cache: The caches.
            positions: int32 [3, B, L].
            launch: Whether to compute; otherwise the cache only has the shapes that it would have.

        Returns:
            What heads read, see `decode`; None without a head or explicit positions.
        """
        return self._read(self._extend(token_ids, chunk, cache, positions, launch))

    def _extend(
        self, token_ids: mx.array, chunk: ImageChunk | None, cache: list, positions: np.ndarray, launch: bool
    ) -> mx.array | None:
        images = {} if chunk is None else chunk.arguments()
        with masked(chunk, cache):
            if not self._wants_hidden:
                self.lm(  # lazy: only the cache is ever evaluated
                    token_ids, cache=self._nested(cache), **images, **self._flat(positions)
                )
                hidden = None
            elif not self.explicit_positions:
                hidden = self._states(token_ids, cache, positions)
            else:
                hidden = self._hidden(token_ids, cache, mx.array(positions), **images)
        if launch:
            mx.async_eval([layer.state for layer in cache])
        return hidden

    def extend_to_end(
        self,
        token_ids: mx.array,
        chunk: ImageChunk | None,
        cache: list,
        positions: np.ndarray,
        select: Select = lambda hidden: hidden[:, -1:],
    ) -> tuple[mx.array, mx.array | None]:
        """Compute the last prompt tokens into the caches of one row or, with `select`, of several.

        Args:
            token_ids: int32 [B, L].
            chunk: See `extend`.
            cache: The caches.
            positions: int32 [3, B, L].
            select: Returns the positions [E, 1, hidden] of hidden states [B, L, hidden] whose logits are wanted.
                Requires `selects_positions`; the default is the last one.

        Returns:
            Logits [E, 1, vocab] of the selected positions, and the hidden states of `extend`; both lazy.
        """
        if self._wants_hidden:
            hidden = self._extend(token_ids, chunk, cache, positions, launch=False)
            assert hidden is not None
            return self.logits(select(hidden)), self._read(hidden)
        if self.selects_positions:
            images = {} if chunk is None else chunk.arguments()
            with masked(chunk, cache):
                logits = self._selected_logits(token_ids, cache, select, images | self._flat(positions))
            return logits, self._read()
        before = None
        if token_ids.shape[1] > 1:
            but_last = None if chunk is None else chunk.but_last()
            before = self.extend(token_ids[:, :-1], but_last, cache, positions[..., :-1])
        last: dict[str, Any] = {} if chunk is None else {"inputs_embeds": chunk.embeds[:, -1:]}
        last |= self._flat(positions[..., -1:])
        logits = self.lm(token_ids[:, -1:], cache=self._nested(cache), **last).logits[:, -1:]
        read = self._read()
        return logits, read if before is None or read is None else mx.concatenate([before, read], axis=1)

    def extend_with_logits(
        self, token_ids: mx.array, cache: list, positions: np.ndarray
    ) -> tuple[mx.array, mx.array | None]:
        """Compute prompt tokens into the caches of one row.

        Args:
            token_ids: int32 [1, L].
            cache: The caches.
            positions: int32 [3, 1, L].

        Returns:
            Logits [1, L, vocab], and the hidden states of `extend`; both lazy.
        """
        if not self._wants_hidden:
            logits = self.lm(token_ids, cache=self._nested(cache), **self._flat(positions)).logits
            return logits, self._read()
        hidden = self._extend(token_ids, None, cache, positions, launch=False)
        assert hidden is not None
        return self.logits(hidden), self._read(hidden)

    @cached_property
    def selects_positions(self) -> bool:
        """Whether `extend_to_end` can compute the logits of some positions alone. Computes nothing."""
        if self._wants_hidden:
            return True
        try:
            logits = self._selected_logits(mx.zeros((1, 2), mx.int32), self.make_cache(), lambda hidden: hidden[:, 1:])
        except (AttributeError, TypeError, ValueError, IndexError):
            return False
        return isinstance(logits, mx.array) and logits.ndim == 3 and logits.shape[:2] == (1, 1)

    def _selected_logits(
        self, token_ids: mx.array, cache: list, select: Select, more: dict[str, Any] | None = None
    ) -> mx.array:
        lm: Any = SelectedPositions(self.lm, select)
        return type(self.lm).__call__(lm, token_ids, cache=self._nested(cache), **(more or {})).logits

    def states(self, token_ids: mx.array, cache: list, positions: np.ndarray | mx.array) -> mx.array:
        """Compute tokens into a cache; return hidden states [B, L, hidden] after the last norm.

        The hidden states are lazy. Takes no images. Requires that `states_unsupported_reason` returns None.
        """
        hidden = self._states(token_ids, cache, positions)
        self._parts(hidden)  # frees the outputs of the layers
        return hidden

    def _states(self, token_ids: mx.array, cache: list, positions: np.ndarray | mx.array) -> mx.array:
        if self.explicit_positions:
            return self._hidden(token_ids, cache, mx.array(positions))
        return self._layers(token_ids, cache=self._nested(cache), **self._flat(positions))

    def states_unsupported_reason(self) -> str | None:
        """Return why this model's hidden states are not available, None if they are. Computes nothing."""
        try:
            states = self.states(mx.zeros((1, 1), mx.int32), self.make_cache(), np.zeros((3, 1, 1), np.int32))
        except (AttributeError, TypeError, ValueError) as error:
            return f"its layers cannot be run without its output layer ({type(error).__name__})"
        if not isinstance(states, mx.array) or states.ndim != 3:
            return "its layers do not return hidden states"
        return None

    def _hidden(self, token_ids: mx.array, cache: list, positions: mx.array, **kwargs: Any) -> mx.array:
        if not self._returns_hidden:
            positions = mx.broadcast_to(positions, (3, *token_ids.shape))
            return self.lm.model(token_ids, cache=self._nested(cache), position_ids=positions, **kwargs)
        out = self.lm(
            token_ids,
            cache=self._nested(cache),
            position_ids=positions,
            skip_logits=True,
            return_hidden=True,
            capture_layer_ids=[],
            **kwargs,
        )
        return out.hidden_states[-1]
