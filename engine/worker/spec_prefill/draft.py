"""The draft model: reads a prompt chunk by chunk, then generates a few tokens and reports what they attended to."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import ArraysCache

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import draft_of, read_optional_json
from engine.spec_prefill_config import SpecPrefillConfig
from engine.worker import devices, loader, memory, patches
from engine.worker.kv_cache import SequenceCache, num_bytes
from engine.worker.kv_layer import rounded
from engine.worker.language_model import LanguageModel
from engine.worker.layer_kinds import appends
from engine.worker.spec_prefill.attention import AttentionTrace, attention_layers, importance

PROBE_TOKENS = 48
TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative to the largest value that a layer adds, or to the largest logit; rounding of the sum itself is allowed on
top."""

MAX_SCORES_BYTES = 2**28
"""On a CPU attention stores its scores, float32 [heads, chunk, context]; chunks are reduced to this limit."""

MAX_GPU_SCORES_BYTES = 2**30
"""The same on a GPU, for heads larger than MAX_FUSED_HEAD_DIM."""

MAX_FUSED_HEAD_DIM = 128
"""MLX's GPU kernels compute attention over heads of at most this size without storing scores."""

SMALLEST_CHUNK = 16

MAX_OBSERVED_BYTES = 2**25
"""Limit of the attention weights, float32 [heads, steps, prompt], computed at once per layer."""

BlockForward = Callable[[mx.array, Any], mx.array]
"""(hidden [1, 1, hidden], the layer's cache) -> hidden."""


def draft_engine_config(config: SpecPrefillConfig, device: str) -> EngineConfig:
    """Return the loader's configuration of the draft. device: auto, cpu or gpu."""
    return EngineConfig.model_validate(
        {
            "model": draft_of(config.draft_model),
            "revision": config.draft_revision,
            "rope_scaling": config.draft_rope_scaling,
            "device": device,
            "dtype": config.dtype,
            "mtp": "off",
            "mlx_cache_mb": config.mlx_cache_mb,
        }
    )


def load_draft(config: EngineConfig) -> "Draft":
    """Load the draft on the calling thread, which must be the one that will use it.

    Raises:
        EngineFailed: It cannot be loaded or cannot score.
    """
    model = loader.load(config, lambda progress: None)
    memory.set_limits(config)
    try:
        return Draft(model)
    except Exception as error:  # the model may have any architecture
        reason = str(error) if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}"
        raise EngineFailed(f"the draft model cannot score prompts: {reason}") from error


class Draft:
    """A loaded draft model, without state per prompt: each prompt brings its own cache.

    Raises EngineFailed, or whatever the library raises, for a model whose attention cannot be read.

    Attributes:
        stop_token_ids: From its own configuration.
        bytes_per_token: Bytes per token of a cache, over all attention layers.
        state_bytes: Bytes of a cache's recurrent states.
    """

    def __init__(self, model: loader.LoadedModel):
        patches.install(decodes=False)
        self._language_model = LanguageModel(model.module.language_model)
        self._lm = self._language_model.lm
        self._tolerance = TOLERANCE.get(model.dtype, max(TOLERANCE.values()))
        self.vocab_size = model.vocab_size
        self.max_context_tokens = model.max_context_tokens
        self.num_weight_bytes = model.num_weight_bytes
        self.fingerprint = model.fingerprint
        generation = read_optional_json(model.path / "generation_config.json")
        self.stop_token_ids = _stop_token_ids(model.config, model.config.get("text_config") or {}, generation)
        self._layers = attention_layers(self._lm.model.layers, self.make_cache())
        self.compile_blocks(devices.on_gpu() and mx.cuda.is_available())
        probed = self._check()
        self._head_dim = max(layer.keys.shape[-1] for layer in probed if appends(layer) and layer.keys is not None)
        self.bytes_per_token, self.state_bytes = _measured(probed)
        mx.clear_cache()

    def compile_blocks(self, compiles: bool) -> None:
        """Set whether look-ahead steps run blocks with a recurrent state as compiled graphs."""
        self._blocks = [
            compiled_block(block) if compiles and layer is None else plain_block(block)
            for block, layer in zip(self._lm.model.layers, self._layers, strict=True)
        ]

    def make_cache(self) -> SequenceCache:
        """Return an empty cache for one prompt."""
        return self._language_model.make_cache()

    def cache_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a prompt's cache with `num_tokens` tokens."""
        return self.state_bytes + rounded(num_tokens) * self.bytes_per_token

    def chunk_tokens(self, start: int, wanted: int) -> int:
        """Return how many of the `wanted` tokens from `start` on to read in one forward."""
        if devices.on_gpu() and self._head_dim <= MAX_FUSED_HEAD_DIM:
            return wanted
        heads = max(layer.num_heads for layer in self._layers if layer is not None)
        most = MAX_GPU_SCORES_BYTES if devices.on_gpu() else MAX_SCORES_BYTES
        fitting = most // (4 * heads * (start + wanted))
        return min(wanted, max(fitting, SMALLEST_CHUNK))

    def extend(self, token_ids: np.ndarray, start: int, cache: SequenceCache, num_slots: int) -> None:
        """Read a chunk into the cache, evaluated.

        Args:
            token_ids: int32 [n].
            start: Position of the first token.
            cache: The prompt's cache.
            num_slots: Tokens to allocate slots for.
        """
        self._forward(token_ids, start, cache, skip_logits=True)  # lazy: only the cache is ever evaluated
        for layer in cache:
            if appends(layer):
                layer.prefix_cache_reserve(num_slots)
        mx.eval([layer.state for layer in cache])

    def look_ahead(self, token_id: mx.array, cache: SequenceCache) -> tuple[mx.array, list[mx.array]]:
        """Launch a step that reads one token, int32 [1, 1], without waiting for the device.

        Returns:
            The draft's next token, int32 [1, 1], and what `observe` needs of this step.
        """
        logits, seen = self.walk(token_id, cache)
        before = [one.before for one in seen]
        following = logits[:, -1].argmax(axis=-1, keepdims=True).astype(mx.int32)
        mx.async_eval(following, before, [layer.state for layer in cache])
        return following, before

    def observe(
        self, steps: Sequence[list[mx.array]], position: int, cache: SequenceCache, num_prompt: int
    ) -> mx.array:
        """Return the mean importance of the prompt's tokens to the tokens that the steps have read, lazy.

        Args:
            steps: Results of `look_ahead`, one per step.
            position: Position of the first step's token.
            cache: The prompt's cache.
            num_prompt: Tokens of the prompt.

        Returns:
            float32 [num_prompt].
        """
        layers = [(layer, own) for layer, own in zip(self._layers, cache, strict=True) if layer is not None]
        row_bytes = 4 * num_prompt * max(layer.num_heads for layer, _ in layers)
        at_once = max(MAX_OBSERVED_BYTES // row_bytes, 1)
        total = mx.zeros(num_prompt)
        for start in range(0, len(steps), at_once):
            before = [
                mx.concatenate(list(states), axis=1) for states in zip(*steps[start : start + at_once], strict=True)
            ]
            total = total + importance(layers, before, position + start, num_prompt).sum(axis=0)
            mx.async_eval(total)
        return total / len(steps)

    def walk(self, token_id: mx.array, cache: SequenceCache) -> tuple[mx.array, list[AttentionTrace]]:
        """Compute one token, int32 [1, 1], layer by layer.

        Returns:
            Logits [1, 1, vocab] and a record of each attention layer, lazy.
        """
        model = self._lm.model
        hidden, seen = model.embed_tokens(token_id), []
        for block, layer, own in zip(self._blocks, self._layers, cache, strict=True):
            before, hidden = hidden, block(hidden, own)
            if layer is not None:
                seen.append(AttentionTrace(layer, own, before, hidden))
        return self._language_model.logits(model.norm(hidden)), seen

    def _check(self) -> SequenceCache:
        """Check the layer-by-layer forward with a probe and return the probe's cache.

        `walk` must equal the model's own forward, and the layers' outputs must follow from the queries and keys read
        here.

        Raises:
            EngineFailed: They differ; the message names the layer and the error.
        """
        ids = (np.arange(PROBE_TOKENS) * 7919 % self.vocab_size).astype(np.int32)
        last = PROBE_TOKENS - 1
        walked, own = self.make_cache(), self.make_cache()
        for cache in (walked, own):
            self.extend(ids[: last // 2], 0, cache, PROBE_TOKENS)
            self.extend(ids[last // 2 : last], last // 2, cache, PROBE_TOKENS)
        logits, seen = self.walk(mx.array(ids[None, last:]), walked)
        expected = self._forward(ids[last:], last, own)[:, -1:]
        self._compare("the logits computed layer by layer differ from the model's", logits, expected, expected)
        for one in seen:
            again = one.layer.output(one.before, last, one.cache)
            what = f"the output of layer {one.layer.index} differs from that computed from its queries and keys"
            self._compare(what, again, one.behind, one.behind - one.before)
        return walked

    def _compare(self, what: str, found: mx.array, expected: mx.array, scale: mx.array) -> None:
        """Raise EngineFailed if the error exceeds the tolerance relative to the largest value of `scale`."""
        error, size, largest = (
            np.abs(np.array(array.astype(mx.float32))).max() for array in (found - expected, scale, expected)
        )
        limit = self._tolerance * size + 4 * mx.finfo(expected.dtype).eps * largest
        if not error <= limit:
            raise EngineFailed(f"{what}: the error is {error:.3g}, the limit is {limit:.3g}")

    def _forward(self, token_ids: np.ndarray, start: int, cache: SequenceCache, **kwargs: Any) -> Any:
        """Compute the model's own forward; return logits [1, n, vocab], lazy, None if they can be skipped."""
        tokens = mx.array(token_ids[None].astype(np.int32))
        if not self._language_model.explicit_positions:
            return self._lm(tokens, cache=cache).logits
        positions = mx.arange(start, start + len(token_ids), dtype=mx.int32)
        positions = mx.broadcast_to(positions, (3, 1, len(token_ids)))
        return self._lm(tokens, cache=cache, position_ids=positions, capture_layer_ids=[], **kwargs).logits


def plain_block(block: Any) -> BlockForward:
    """Return a function that computes a block for one token."""
    return lambda hidden, cache: block(hidden, mask=None, cache=cache)


def compiled_block(block: Any) -> BlockForward:
    """Return a function that computes a block with a recurrent state for one token; compiled once, as shapes are fixed.

    Three of four layers of a hybrid model are such blocks; on CUDA building a step takes longer than computing it.
    """

    @mx.compile
    def run(hidden: mx.array, *slots: mx.array) -> Any:
        cache = ArraysCache(len(slots))
        cache.cache = list(slots)
        return block(hidden, mask=None, cache=cache), *cache.cache

    def step(hidden: mx.array, cache: Any) -> mx.array:
        if any(slot is None for slot in cache.cache):  # a prompt of one token
            return block(hidden, mask=None, cache=cache)
        hidden, *cache.cache = run(hidden, *cache.cache)
        return hidden

    return step


def _stop_token_ids(*configs: dict[str, Any]) -> frozenset[int]:
    found: list[Any] = [config.get("eos_token_id") for config in configs]
    flat: Sequence[Any] = [id_ for ids in found for id_ in (ids if isinstance(ids, list) else [ids])]
    return frozenset(id_ for id_ in flat if isinstance(id_, int))


def _measured(cache: SequenceCache) -> tuple[int, int]:
    """Return bytes per token in attention layers, and bytes of recurrent states."""
    attention = [layer for layer in cache if appends(layer)]
    per_token = sum(layer.nbytes // rounded(layer.offset) for layer in attention)
    return per_token, num_bytes(cache) - num_bytes(attention)
