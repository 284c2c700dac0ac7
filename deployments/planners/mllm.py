"""MLLM: the planner of requests with images and videos."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.args import AppArgs
from deployments.planners.planner import Planner
from deployments.ray_internals import by_reference
from deployments.requests import ChatRequest
from engine.errors import InvalidRequest
from engine.processing.images import ImagePreprocessor
from engine.processing.media import MediaLoader
from engine.processing.message import image_sources
from engine.protocol import ImagePatches


@by_reference
@serve.deployment()
class MLLM(Planner):
    """Also loads images and frames of videos, if the model reads them."""

    def __init__(self, args: AppArgs, engine: DeploymentHandle | None = None, scorer: DeploymentHandle | None = None):
        super().__init__(args, engine, scorer)
        model_dir = self._planner.model_dir
        self._loader: MediaLoader | None = None
        if ImagePreprocessor.supported(model_dir):
            preprocessor = ImagePreprocessor(model_dir)
            self._loader = MediaLoader(args.media, preprocessor.grid, video=preprocessor.video_grid)
            self._loader.workers.start_one()

    @asynccontextmanager
    async def _images(self, request: ChatRequest) -> AsyncIterator[tuple[ImagePatches, ...]]:
        sources = list(image_sources(request.messages))
        if self._loader is None:
            raise InvalidRequest("this model does not accept images", sources[0].field if sources else "messages")
        async with self._loader.load(sources) as images:
            yield images

    async def status(self) -> dict[str, Any]:
        images = self._loader.status() if self._loader is not None else {}
        return {**await super().status(), "images": images}
