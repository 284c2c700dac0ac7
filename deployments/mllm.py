"""MLLM: the planner of requests with images and videos."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.args import AppArgs
from deployments.planning import PromptPlanner
from deployments.process import node_id, replica_info
from deployments.protocol import ChatRequest, Plan
from deployments.ray_internals import by_reference, listen_on_node_address
from deployments.serve_log import join_serve_log
from deployments.sparse_planner import PromptFacts, SparsePlanner
from engine.processing.images import ImagePreprocessor
from engine.processing.media import MediaLoader
from engine.processing.message import image_sources
from engine.protocol import ImagePatches, InvalidRequest


@by_reference
@serve.deployment()
class MLLM:
    """Loads images, renders the chat template and tokenizes, on the node whose engine will answer."""

    def __init__(self, args: AppArgs, engine: DeploymentHandle | None = None, scorer: DeploymentHandle | None = None):
        listen_on_node_address()
        join_serve_log()
        self._planner = PromptPlanner(args.engine, finds_boundaries=args.spec_prefill.enabled)
        self._sparse = SparsePlanner(args.spec_prefill, PromptFacts.of(self._planner.tokenizer), engine, scorer)
        model_dir = self._planner.model_dir
        self._loader: MediaLoader | None = None
        if ImagePreprocessor.supported(model_dir):
            preprocessor = ImagePreprocessor(model_dir)
            self._loader = MediaLoader(args.media, preprocessor.grid, video=preprocessor.video_grid)
            self._loader.workers.start_one()

    async def plan(self, request: ChatRequest) -> Plan:
        """Prepare a request with images for the engine.

        Raises:
            InvalidRequest: Names the content part or field.
            ContextLengthExceeded: The prompt does not fit the context.
            Unavailable: No image worker can be started.
        """
        began_s = time.monotonic()
        async with self._images(request) as images:
            loaded_s = time.monotonic()
            dense = await self._planner.engine_request(request, request.messages, images)
            prompted_s = time.monotonic()
            planned, report = await self._sparse.plan(request, dense)
            sparse_s = time.monotonic() - prompted_s
            seconds = {"images": loaded_s - began_s, "prompt": prompted_s - loaded_s, "sparse": sparse_s}
            return Plan(planned, node_id(), report, seconds)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Count the prompt's tokens, images included. Raises what `plan` raises."""
        async with self._images(request) as images:
            return await self._planner.count_tokens(request, request.messages, images)

    async def token_ids(self, request: ChatRequest) -> list[int]:
        """Return the prompt's token ids. Raises what `plan` raises."""
        async with self._images(request) as images:
            return (await self._planner.token_ids(request, request.messages, images)).tolist()

    @asynccontextmanager
    async def _images(self, request: ChatRequest) -> AsyncIterator[tuple[ImagePatches, ...]]:
        sources = list(image_sources(request.messages))
        if self._loader is None:
            raise InvalidRequest("this model does not accept images", sources[0].field if sources else "messages")
        async with self._loader.load(sources) as images:
            yield images

    async def status(self) -> dict[str, Any]:
        images = self._loader.status() if self._loader is not None else {}
        return {**replica_info(), "spec_prefill": self._sparse.status(), "images": images}
