"""Ingress: the HTTP faces in front of the graph, one per node; turns the engine's tokens into text."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.chat import ChatRequest, Route, TextDelta, TextLogprobs
from deployments.engine_client import PLAN_TIMEOUT_S, EngineClient, EngineStream
from deployments.http.cache import cache_body, cleared_body
from deployments.http.config import HttpConfig
from deployments.http.openai import create_app
from deployments.policies import nodes_offering
from deployments.replica import replica_info
from engine.config import EngineConfig
from engine.processing.checkpoint import media_kinds, read_config, resolve_checkpoint
from engine.processing.detokenizer import Detokenizer
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineFailed, FinishReason, TokenChunk

STATUS_TIMEOUT_S = 5.0
READY_CHECKED_EVERY_S = 1.0


class TextGeneration:
    """See chat.Generation. A choice ends as soon as a stop string is complete, the engine's stream with the last one.

    The engine works on at a choice that a stop string has ended, as long as others run; nobody sees what comes of it.
    """

    def __init__(self, stream: EngineStream, tokenizer: ChatTokenizer, stop: tuple[str, ...]):
        request = stream.plan.request
        self.num_prompt_tokens = len(request.token_ids)
        self.num_cached_tokens = stream.num_cached_tokens
        self.num_skipped_tokens = stream.num_skipped_tokens
        self.spec_prefill = stream.plan.spec_prefill
        self._stream = stream
        self._token_bytes = tokenizer.token_bytes
        self._running = {index: tokenizer.detokenizer(stop) for index in range(request.num_choices)}

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Raises EngineFailed when the engine cannot finish the answer."""
        try:
            async for chunk in self._stream:
                if (detokenizer := self._running.get(chunk.index)) is None:
                    continue
                if chunk.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise EngineFailed(chunk.error or "The engine gave up the request. Please send it again.")
                delta = self._delta(chunk, detokenizer)
                if delta.finish_reason is not None:
                    del self._running[chunk.index]
                yield delta
                if not self._running:
                    return
        finally:
            await self.aclose()

    def _delta(self, chunk: TokenChunk, detokenizer: Detokenizer) -> TextDelta:
        num_before = detokenizer.num_tokens
        text = detokenizer.push(chunk.token_ids)
        num_tokens = detokenizer.num_tokens - num_before  # fewer than the chunk has where a stop string is complete
        finish_reason = FinishReason.STOP if detokenizer.stopped else chunk.finish_reason
        if finish_reason is not None:
            text += detokenizer.finish()
        return TextDelta(
            text,
            num_tokens,
            finish_reason.value if finish_reason else None,
            chunk.index,
            self._logprobs(chunk, num_tokens) if chunk.logprobs else (),
            chunk.num_drafted,
            chunk.num_accepted,
        )

    def _logprobs(self, chunk: TokenChunk, num_tokens: int) -> tuple[TextLogprobs, ...]:
        spell = self._token_bytes
        pairs = zip(chunk.token_ids[:num_tokens], chunk.logprobs[:num_tokens], strict=True)
        return tuple(
            TextLogprobs(spell(token_id), found.logprob, tuple((spell(other), logprob) for other, logprob in found.top))
            for token_id, found in pairs
        )

    async def aclose(self) -> None:
        await self._stream.aclose()


@serve.deployment()
@serve.ingress()
class Ingress:
    """Implements chat.Backend for the HTTP faces."""

    def __init__(
        self,
        model_name: str,
        config: EngineConfig,
        http: HttpConfig,
        effective_config: dict[str, Any],
        engine: DeploymentHandle,
        text: DeploymentHandle,
        mllm: DeploymentHandle,
        scorer: DeploymentHandle | None = None,
        plan_timeout_s: float = PLAN_TIMEOUT_S,
    ):
        self.model_name = model_name
        self._http = http
        self._effective_config = effective_config
        model_dir = resolve_checkpoint(config.model, config.revision, weights=False)
        self._tokenizer = ChatTokenizer(model_dir)
        self._media_kinds = media_kinds(model_dir, read_config(model_dir))
        self._client = EngineClient(engine, {Route.TEXT: text, Route.MLLM: mllm}, plan_timeout_s=plan_timeout_s)
        self._engines = engine
        self._graph = {"engines": engine, "text": text, "mllm": mllm, "spec_prefill": scorer}
        self._ready_until = float("-inf")

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self, self._http, self._media_kinds, self._tokenizer.keeps_late_system)

    async def start(self, request: ChatRequest, route: Route) -> TextGeneration:
        stream = await self._client.start(request, route)
        return TextGeneration(stream, self._tokenizer, request.stop)

    async def status(self) -> dict[str, Any]:
        """Sums over all engines, then every replica of the graph, and the configuration in effect.

        `spec_prefill`: the scorers, null where there are none by configuration.
        """
        there = {name: handle for name, handle in self._graph.items() if handle is not None}
        replicas = dict(zip(there, await asyncio.gather(*map(status_of_all, there.values())), strict=True))
        engines = [replica["engine"] for replica in replicas["engines"]]
        return {
            "model": self.model_name,
            "ready": any(engine["state"] == "ready" for engine in engines),
            "num_running": sum(engine["num_running"] for engine in engines),
            "num_waiting": sum(engine["num_waiting"] for engine in engines),
            "spec_prefill": None,
            **replicas,
            "ingress": [replica_info()],
            "config": self._effective_config,
        }

    async def cache_status(self) -> dict[str, Any]:
        answers, missing = await self._client.ask_all("cache_status", await engine_node_ids())
        return cache_body(answers, missing, self._tokenizer.token_bytes)

    async def clear_cache(self) -> dict[str, Any]:
        return cleared_body(*await self._client.ask_all("clear_cache", await engine_node_ids()))

    async def not_ready(self) -> str | None:
        if time.monotonic() < self._ready_until:
            return None
        engines = await status_of_all(self._engines)
        if any(replica["engine"]["state"] == "ready" for replica in engines):
            self._ready_until = time.monotonic() + READY_CHECKED_EVERY_S
            return None
        return engines[0]["engine"]["error"] if engines else "No engine is ready: the model is being loaded."


async def engine_node_ids() -> list[str]:
    """The nodes on which there is to be an engine, also while there is none; [''] without Ray."""
    return await asyncio.to_thread(nodes_offering, "mlx") if ray.is_initialized() else [""]


async def status_of_all(handle: DeploymentHandle) -> list[dict[str, Any]]:
    """What every running replica of a deployment says about itself; those that do not answer in time are left out."""
    try:
        answers = await handle.broadcast("status").results_async(timeout_s=STATUS_TIMEOUT_S, return_exceptions=True)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return [answer for answer in answers if isinstance(answer, dict)]
