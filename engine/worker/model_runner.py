"""Executes what the scheduler decides: the only caller of a forward pass."""

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from engine.config import EngineConfig
from engine.core.batch import PrefillOutput
from engine.core.request import Request
from engine.processing.images import ImagePreprocessor
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import blas, kv_cache, loader, memory
from engine.worker.decode import DecodeBatch
from engine.worker.prefill import Prefill, Prompt, first_token
from engine.worker.view import View
from engine.worker.vision import VisionEncoder

WARM_UP_TOKENS = 16


def load_runner(config: EngineConfig, progress: Callable[[float], None]) -> "MLXRunner":
    """Loads the model on the calling thread, which must be the one that will call the runner."""
    runner = MLXRunner(loader.load(config, progress), config)
    memory.set_limits(config)
    runner.warm_up()
    return runner


class MLXRunner:
    """One model, one decode batch, and the prompts that are on their way into it."""

    def __init__(self, model: loader.LoadedModel, config: EngineConfig):
        self._model = model
        self._view = View(model.module.language_model)
        self._vision = self._make_vision(model, config)
        self._prefill = Prefill(self._view, self._vision, model.config.get("image_token_id"))
        self._batch = DecodeBatch(self._view)
        self._prompts: dict[str, Prompt] = {}
        self.max_context_tokens = model.max_context_tokens
        self.vocab_size = model.vocab_size
        self.capabilities: dict[str, Any] = {
            "media": sorted(model.media_kinds),
            "device": str(mx.default_device()),
            "dtype": model.dtype,
            "blas": blas.preload().source,
            "explicit_positions": self._view.explicit_positions,
        }

    def warm_up(self) -> None:
        """One and two rows and a picture once through everything: no client shall wait for kernels to be compiled."""
        prompt = np.zeros(WARM_UP_TOKENS, np.int32)
        requests = [Request(EngineRequest(f"warm-up-{i}", prompt, SamplingParams(4), ())) for i in range(2)]
        for request in requests:
            self.prefill(request, len(prompt) // 2)
            self.prefill(request, len(prompt))
            self.decode()
        self.drop([request.id for request in requests])
        if self._vision is not None:
            self._vision.warm_up()
        mx.clear_cache()

    def decode(self) -> dict[str, tuple[int, ...]]:
        return self._batch.step()

    def prefill(self, request: Request, max_tokens: int) -> PrefillOutput:
        try:
            return self._advance(request, max_tokens)
        except Exception:
            self._prompts.pop(request.id, None)
            raise

    def drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._prompts.pop(request_id, None)
        self._batch.leave(set(request_ids))

    def reset(self) -> None:
        self._batch.clear()

    def memory(self) -> dict[str, int]:
        return memory.usage() | {
            "weights_bytes": self._model.num_weight_bytes,
            "decode_cache_bytes": self._batch.num_cache_bytes,
            "prefill_cache_bytes": sum(kv_cache.num_bytes(p.cache) for p in self._prompts.values()),
            "vision_cache_bytes": self._vision.num_cached_bytes if self._vision else 0,
        }

    def close(self) -> None:
        """Gives everything back, on the thread that took it, which must not use MLX again."""
        self._prompts.clear()
        self._batch.clear()
        del self._model, self._view, self._prefill, self._vision, self._batch
        gc.collect()
        mx.clear_cache()
        mx.clear_streams()

    def _advance(self, request: Request, max_tokens: int) -> PrefillOutput:
        prompt = self._prompts.get(request.id)
        if prompt is None:
            prompt = self._prompts[request.id] = self._prefill.begin(request)
        if self._prefill.encode_next_image(prompt, request.spec.images):
            return PrefillOutput(0)
        num_tokens, logits = self._prefill.advance(prompt, max_tokens)
        if logits is None:
            return PrefillOutput(num_tokens)
        token = first_token(logits, request)
        del self._prompts[request.id]
        self._batch.join(request.id, request.spec.sampling, prompt.cache, prompt.next_position, token)
        return PrefillOutput(num_tokens, token)

    @staticmethod
    def _make_vision(model: loader.LoadedModel, config: EngineConfig) -> VisionEncoder | None:
        if "image" not in model.media_kinds:
            return None
        return VisionEncoder(model.module, ImagePreprocessor(model.path).normalization, config.vision_cache_mb * 2**20)
