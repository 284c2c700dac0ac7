"""MLLM: the planner of requests with pictures."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.chat import MEDIA_KINDS, ChatRequest, Message, Plan, Route
from deployments.planning import PromptPlanner
from deployments.replica import log_refusals_in_one_line, node_id, replica_info
from deployments.sparse_planner import PromptFacts, SparsePlanner
from engine.config import EngineConfig, MediaConfig, SpecPrefillConfig
from engine.processing.images import ImagePreprocessor
from engine.processing.media import MediaLoader
from engine.protocol import ImagePatches, InvalidRequest

MAX_PIXEL_BYTES = 60 * 2**20
"""Of all pictures of a request after resizing: the plan must fit in one gRPC message, see launch.py."""


@serve.deployment()
class MLLM:
    """Fetches, decodes and cuts the pictures, renders and tokenizes, on the node whose engine will answer."""

    def __init__(
        self,
        config: EngineConfig,
        media: MediaConfig,
        spec_prefill: SpecPrefillConfig,
        engine: DeploymentHandle | None = None,
        scorer: DeploymentHandle | None = None,
    ):
        log_refusals_in_one_line()
        self._planner = PromptPlanner(config, finds_boundaries=spec_prefill.enabled)
        self._sparse = SparsePlanner(spec_prefill, PromptFacts.of(self._planner.tokenizer), engine, scorer)
        self._loader = MediaLoader(media)
        model_dir = self._planner.model_dir
        self._preprocessor = ImagePreprocessor(model_dir) if ImagePreprocessor.supported(model_dir) else None

    async def plan(self, request: ChatRequest) -> Plan:
        """Raises InvalidRequest naming the part that is at fault, ContextLengthExceeded."""
        images = await self._load(list(image_sources(request.messages)))
        dense = await self._planner.engine_request(request, request.messages, images)
        planned, report = await self._sparse.plan(request, dense)
        return Plan(planned, Route.MLLM, node_id(), report)

    async def status(self) -> dict[str, Any]:
        return {**replica_info(), "spec_prefill": self._sparse.status()}

    async def _load(self, sources: Sequence[tuple[str, str]]) -> tuple[ImagePatches, ...]:
        if self._preprocessor is None:
            raise InvalidRequest("this model sees no images", sources[0][0] if sources else "messages")
        images, num_bytes = [], 0
        for (field, _), decoded in zip(sources, await self._loader.load_images(sources), strict=True):
            image = await asyncio.to_thread(self._preprocessor.patches, decoded)
            num_bytes += image.patches.nbytes
            if num_bytes > MAX_PIXEL_BYTES:
                raise InvalidRequest(
                    f"the images up to this one hold {num_bytes} bytes of pixels after resizing; "
                    f"the limit is {MAX_PIXEL_BYTES}",
                    field,
                )
            images.append(image)
        return tuple(images)


def image_sources(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Path of the field and URL of every picture, in the order of the conversation, tool results included.

    Raises InvalidRequest for any other kind of media.
    """
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = MEDIA_KINDS.get(part.get("type"))
            field = f"messages[{i}].content[{j}]"
            if kind == "image":
                yield _url(part, field)
            elif kind is not None:
                raise InvalidRequest(f"{kind} is not supported; a message may hold text and images", field)


def _url(part: dict[str, Any], field: str) -> tuple[str, str]:
    """A picture is `{"type": T, KEY: URL}` or `{"type": T, KEY: {"url": URL}}`; the key is image_url, image or url."""
    for key in ("image_url", "image", "url"):
        value = part.get(key)
        url = value.get("url") if isinstance(value, dict) else value
        if isinstance(url, str):
            return (f"{field}.{key}.url" if isinstance(value, dict) else f"{field}.{key}"), url
    raise InvalidRequest("an image needs a URL", f"{field}.image_url")
