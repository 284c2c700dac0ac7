"""The draft model: reads a prompt chunk by chunk, then looks ahead token by token and tells what it attended to."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import ArraysCache, KVCache, make_prompt_cache

from engine.config import EngineConfig, SpecPrefillConfig
from engine.processing.checkpoint import draft_of, read_optional_json
from engine.protocol import EngineFailed
from engine.worker import loader, memory
from engine.worker.kv_cache import RowCache, num_bytes, rounded
from engine.worker.patches import attention_cpu, gated_delta_chunks, gated_delta_cuda, silu_cpu
from engine.worker.spec_prefill.attention import Seen, attention_layers, importance

PROBE_TOKENS = 48
TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Of the largest number that a layer adds, or of the largest logit; rounding of the sum itself is allowed for."""

MAX_SCORES_BYTES = 2**28
"""On the CPU attention holds its scores, float32 [heads, chunk, context]: chunks are smaller where they would pass."""

SMALLEST_CHUNK = 16

MAX_OBSERVED_BYTES = 2**25
"""Limit of the attention weights, float32 [heads, steps, prompt], that are computed at once per layer."""

Block = Callable[[mx.array, Any], mx.array]
"""(hidden [1, 1, hidden], the layer's cache) -> hidden."""


def draft_engine_config(config: SpecPrefillConfig, device: str) -> EngineConfig:
    """What the loader is told; device: auto, cpu or gpu."""
    return EngineConfig.model_validate(
        {
            "model": draft_of(config.draft_model),
            "revision": config.draft_revision,
            "device": device,
            "dtype": config.dtype,
            "mtp": "off",
            "mlx_cache_mb": config.mlx_cache_mb,
        }
    )


def load_draft(config: EngineConfig) -> "Draft":
    """On the calling thread, which must be the one that will use it. Raises EngineFailed, also if it cannot score."""
    model = loader.load(config, lambda progress: None)
    memory.set_limits(config)
    try:
        return Draft(model)
    except Exception as error:  # of whatever architecture the library knows
        reason = str(error) if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}"
        raise EngineFailed(f"this draft cannot score: {reason}") from error


class Draft:
    """One loaded model, without state of its own: each prompt brings its cache.

    stop_token_ids: by its own configuration. bytes_per_token: of a cache, in all attention layers; state_bytes: of its
    recurrent states. Raises EngineFailed, or whatever the library raises, for a model that cannot be read.
    """

    def __init__(self, model: loader.LoadedModel):
        if not loader.on_gpu():
            gated_delta_chunks.install()
            attention_cpu.install()
            silu_cpu.install()
        elif mx.cuda.is_available():
            gated_delta_cuda.install()
        self._lm: Any = model.module.language_model
        self._explicit_positions = hasattr(self._lm, "get_rope_index")
        self._tolerance = TOLERANCE.get(model.dtype, max(TOLERANCE.values()))
        self.vocab_size = model.vocab_size
        self.max_context_tokens = model.max_context_tokens
        self.num_weight_bytes = model.num_weight_bytes
        self.fingerprint = model.fingerprint
        generation = read_optional_json(model.path / "generation_config.json")
        self.stop_token_ids = _stop_token_ids(model.config, model.config.get("text_config") or {}, generation)
        self._layers = attention_layers(self._lm.model.layers, self.make_cache())
        self.compile_blocks(loader.on_gpu() and mx.cuda.is_available())
        self.bytes_per_token, self.state_bytes = _measured(self._check())
        mx.clear_cache()

    def compile_blocks(self, compiles: bool) -> None:
        """From now on steps that look ahead run blocks with a recurrent state as compiled graphs, or do not."""
        self._blocks = [
            compiled_block(block) if compiles and layer is None else plain_block(block)
            for block, layer in zip(self._lm.model.layers, self._layers, strict=True)
        ]

    def make_cache(self) -> RowCache:
        """An empty one for one prompt."""
        return make_prompt_cache(self._lm)

    def cache_bytes(self, num_tokens: int) -> int:
        """What a prompt's cache takes with so many tokens in it."""
        return self.state_bytes + rounded(num_tokens) * self.bytes_per_token

    def chunk_tokens(self, start: int, wanted: int) -> int:
        """How many of the tokens wanted from `start` on are read at once."""
        if loader.on_gpu():
            return wanted
        heads = max(layer.num_heads for layer in self._layers if layer is not None)
        fitting = MAX_SCORES_BYTES // (4 * heads * (start + wanted))
        return min(wanted, max(fitting, SMALLEST_CHUNK))

    def extend(self, token_ids: np.ndarray, start: int, cache: RowCache, num_slots: int) -> None:
        """Reads int32 [n], the tokens from `start` on, into the cache, evaluated, with room for num_slots in all."""
        self._forward(token_ids, start, cache, skip_logits=True)  # lazy: only the cache is ever evaluated
        for layer in cache:
            if isinstance(layer, KVCache):
                layer.prefix_cache_reserve(num_slots)
        mx.eval([layer.state for layer in cache])

    def look_ahead(self, token_id: mx.array, cache: RowCache) -> tuple[mx.array, list[mx.array]]:
        """Launch a step that reads one token, int32 [1, 1]; the device is not waited for.

        Returns:
            The token that the draft would say next, int32 [1, 1], and what `observe` needs of this step.
        """
        logits, seen = self.walk(token_id, cache)
        before = [one.before for one in seen]
        following = logits[:, -1].argmax(axis=-1, keepdims=True).astype(mx.int32)
        mx.async_eval(following, before, [layer.state for layer in cache])
        return following, before

    def observe(self, steps: Sequence[list[mx.array]], position: int, cache: RowCache, num_prompt: int) -> mx.array:
        """The mean importance of the prompt's tokens to the tokens that steps have read, from `position` on.

        Returns:
            float32 [num_prompt], not evaluated.
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

    def walk(self, token_id: mx.array, cache: RowCache) -> tuple[mx.array, list[Seen]]:
        """One token, int32 [1, 1], through the layers one by one.

        Returns:
            Logits [1, 1, vocab] and what was seen on the way, not evaluated.
        """
        model = self._lm.model
        hidden, seen = model.embed_tokens(token_id), []
        for block, layer, own in zip(self._blocks, self._layers, cache, strict=True):
            before, hidden = hidden, block(hidden, own)
            if layer is not None:
                seen.append(Seen(layer, own, before, hidden))
        hidden = model.norm(hidden)
        return self._lm.lm_head(hidden) if hasattr(self._lm, "lm_head") else model.embed_tokens.as_linear(hidden), seen

    def _check(self) -> RowCache:
        """Proves on a probe that the walk is the model's own forward, and that what it reads are the queries and keys
        that the layers use: their outputs can be computed again from them. Returns the probe's cache.

        Raises EngineFailed naming the layer and the error.
        """
        ids = (np.arange(PROBE_TOKENS) * 7919 % self.vocab_size).astype(np.int32)
        last = PROBE_TOKENS - 1
        walked, own = self.make_cache(), self.make_cache()
        for cache in (walked, own):
            self.extend(ids[: last // 2], 0, cache, PROBE_TOKENS)
            self.extend(ids[last // 2 : last], last // 2, cache, PROBE_TOKENS)
        logits, seen = self.walk(mx.array(ids[None, last:]), walked)
        expected = self._forward(ids[last:], last, own)[:, -1:]
        self._compare("the logits of its layers, one by one, are not its own", logits, expected, expected)
        for one in seen:
            again = one.layer.output(one.before, last, one.cache)
            what = f"the output of layer {one.layer.index} is not what its queries and keys give"
            self._compare(what, again, one.behind, one.behind - one.before)
        return walked

    def _compare(self, what: str, found: mx.array, expected: mx.array, scale: mx.array) -> None:
        """Raises EngineFailed beyond the tolerance, relative to the largest of `scale`."""
        error, size, largest = (
            np.abs(np.array(array.astype(mx.float32))).max() for array in (found - expected, scale, expected)
        )
        limit = self._tolerance * size + 4 * mx.finfo(expected.dtype).eps * largest
        if not error <= limit:
            raise EngineFailed(f"{what}: they differ by {error:.3g}, the limit is {limit:.3g}")

    def _forward(self, token_ids: np.ndarray, start: int, cache: RowCache, **kwargs: Any) -> Any:
        """The model's own; logits [1, n, vocab], not evaluated, None where it can do without."""
        tokens = mx.array(token_ids[None].astype(np.int32))
        if not self._explicit_positions:
            return self._lm(tokens, cache=cache).logits
        positions = mx.arange(start, start + len(token_ids), dtype=mx.int32)
        positions = mx.broadcast_to(positions, (3, 1, len(token_ids)))
        return self._lm(tokens, cache=cache, position_ids=positions, capture_layer_ids=[], **kwargs).logits


def plain_block(block: Any) -> Block:
    return lambda hidden, cache: block(hidden, mask=None, cache=cache)


def compiled_block(block: Any) -> Block:
    """A block with a recurrent state, for one token: all its shapes are fixed, so that it is traced but once.

    Three of four layers of a hybrid model are such ones; on CUDA building a step takes longer than computing it.
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


def _measured(cache: RowCache) -> tuple[int, int]:
    """Bytes per token in attention layers, and bytes of recurrent states."""
    attention = [layer for layer in cache if isinstance(layer, KVCache)]
    per_token = sum(layer.nbytes // rounded(layer.offset) for layer in attention)
    return per_token, num_bytes(cache) - num_bytes(attention)
