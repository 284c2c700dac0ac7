"""MediaLoader: downloads, decodes, resizes and cuts the images of requests, within byte budgets."""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any

from engine.errors import EngineFailed, InvalidRequest
from engine.media_config import MediaConfig
from engine.processing.byte_budget import BudgetLease, ByteBudget
from engine.processing.image_fetch import ImageFetcher
from engine.processing.image_grid import ImageGrid
from engine.processing.image_worker import WorkerSettings
from engine.processing.image_workers import ImageWorkers
from engine.processing.images import image_patches
from engine.processing.message import ImageSource
from engine.processing.public_addresses import Resolver
from engine.processing.video_grid import CutVideo, VideoGrid
from engine.protocol import FrameOfVideo, ImagePatches

MAX_REQUEST_BYTES = 60 * 2**20
"""Most bytes of patches of a request: with the prompt they form one gRPC message, limited in deployments/app.py."""
MAX_VIDEO_BYTES = MAX_REQUEST_BYTES // 2
"""Most bytes of patches of a video."""
MIN_LARGEST_IMAGES = 4
"""Images of the largest size that fit into a request, unless media.max_image_tokens is set."""
PLANNING_BYTES = 512 * 2**20
"""Most bytes of patches of all requests that are being planned."""
FETCHED_BYTES = 256 * 2**20
"""Most bytes of encoded images that are being downloaded or wait to be decoded, over all requests."""
MAX_FETCHES = 4
"""Most concurrent downloads of one request, name lookups included."""
MAX_DATA_HEADER = 256


class MediaLoader:
    """Loads the images of requests. Every refusal is an InvalidRequest that names the field, the value and the limit.

    To avoid deadlocks, budgets are acquired in one order: a request downloads several images at once, each within the
    budget of encoded bytes; then it decodes them one by one, and the first one acquires the budget for all patches.

    Raises:
        EngineFailed: The model's smallest image exceeds media.max_image_tokens.
    """

    def __init__(
        self,
        config: MediaConfig,
        grid: ImageGrid,
        resolver: Resolver | None = None,
        video: VideoGrid | None = None,
    ):
        self._config = config
        self.video = None if video is None else video.limited(config.max_video_frames, MAX_VIDEO_BYTES)
        self.grid = grid.limited(most := max_image_tokens(config, grid))
        if self.grid.max_tokens > most:
            raise EngineFailed(
                f"media.max_image_tokens is {most}; an image of this model takes at least {self.grid.max_tokens} tokens"
            )
        self._fetcher = ImageFetcher(config, resolver or Resolver())
        self.fetched = ByteBudget(max(FETCHED_BYTES, config.max_bytes))
        self.planning = ByteBudget(PLANNING_BYTES)
        self.decoded = ByteBudget(config.decode_budget_mb * 2**20)
        self.workers = ImageWorkers(WorkerSettings.of(config, self.grid, self.video), self.decoded)

    @asynccontextmanager
    async def load(self, sources: Sequence[ImageSource]) -> AsyncIterator[tuple[ImagePatches, ...]]:
        """Load the images and videos of one request, in order; a video becomes several images.

        Their bytes count for the budget until the context exits.

        Raises:
            InvalidRequest: The first failure; the other images are cancelled.
            Unavailable: No image worker can be started.
        """
        if len(sources) > self._config.max_images:
            num_videos = sum(source.is_video for source in sources)
            count = f"{len(sources) - num_videos} images" + (f" and {num_videos} videos" if num_videos else "")
            raise InvalidRequest(
                f"the request has {count}; the limit is {self._config.max_images}",
                sources[self._config.max_images].field,
            )
        async with AsyncExitStack() as resources:
            request = _RequestImages(self, sources, resources)
            tasks = [asyncio.ensure_future(self._load(i, source, request)) for i, source in enumerate(sources)]
            try:
                images = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            request.loaded()
            yield tuple(image for medium in images for image in medium)

    def status(self) -> dict[str, Any]:
        """Return the counters of the workers and the current use of the budgets."""
        budgets = {"fetched": self.fetched, "decoded": self.decoded, "planning": self.planning}
        return {
            **asdict(self.workers.counts),
            **{f"{name}_bytes": budget.held_bytes for name, budget in budgets.items()},
            **{f"num_waiting_{name}": budget.num_waiting for name, budget in budgets.items()},
        }

    async def _load(self, number: int, source: ImageSource, request: "_RequestImages") -> tuple[ImagePatches, ...]:
        url, kind = source.url, "video" if source.is_video else "image"
        if (trimmed := url.strip())[:5].lower() == "data:":
            url = trimmed  # as browsers read them

        async def cut(read: Callable[[], bytes | bytearray], is_base64: bool) -> tuple[ImagePatches, ...]:
            if source.is_video:
                return await request.cut_video(read, is_base64, number)
            return (await request.cut(read, is_base64, source.has_low_detail),)

        try:
            if source.is_video and self.video is None:
                raise InvalidRequest("this model does not accept videos")
            match = re.match(r"([a-z][a-z0-9+.-]{0,31}):", url, re.IGNORECASE)
            scheme = match[1].lower() if match else ""
            if scheme == "data":
                start = check_data_url(url, self._config.max_bytes, kind)
                return await cut(lambda: data_url_text(url, start), True)
            if scheme in ("http", "https"):
                async with request.fetches, self.fetched.hold(self._config.max_bytes) as hold:
                    content = await self._fetcher.fetch(url, hold)
                    return await cut(lambda: content, False)
            kinds = f"{scheme}: URLs are" if scheme else "paths and bare data are"
            raise InvalidRequest(f"{kinds} not supported for images; use a data:, http: or https: URL")
        except InvalidRequest as error:  # what fetches and decodes calls everything an image
            raise InvalidRequest(re.sub(r"\bimage(?!/)", kind, error.message), source.field) from None


class _RequestImages:
    """The images of one request that is being loaded."""

    def __init__(self, loader: MediaLoader, sources: Sequence[ImageSource], resources: AsyncExitStack):
        self.fetches = asyncio.Semaphore(MAX_FETCHES)
        self._loader = loader
        self._resources = resources
        self._turn = asyncio.Lock()
        image_bytes = loader.grid.max_tokens * loader.grid.token_bytes
        video_bytes = 0 if loader.video is None else loader.video.max_bytes
        most = sum(video_bytes if source.is_video else image_bytes for source in sources)
        self._max_bytes = min(most, MAX_REQUEST_BYTES)
        self._hold: BudgetLease | None = None
        self._num_bytes = 0

    async def cut(self, read: Callable[[], bytes | bytearray], is_base64: bool, has_low_detail: bool) -> ImagePatches:
        """Decode, resize and cut one image, one at a time per request. Raises InvalidRequest, Unavailable."""
        loader = self._loader
        async with self._turn:
            await self._acquire()
            image = await loader.workers.cut(read, is_base64, has_low_detail)
            self._count(image.patches.nbytes)
        return image_patches(image, loader.grid)

    async def cut_video(
        self, read: Callable[[], bytes | bytearray], is_base64: bool, number: int
    ) -> tuple[ImagePatches, ...]:
        """Decode some frames of a video, resize and cut them; as `cut`. number: of the video in its request."""
        loader = self._loader
        assert loader.video is not None
        async with self._turn:
            await self._acquire()
            video = await loader.workers.cut_video(read, is_base64)
            self._count(video.patches.nbytes)
        return frames_of(video, number, loader.video)

    async def _acquire(self) -> None:
        if self._hold is None:
            self._hold = await self._resources.enter_async_context(self._loader.planning.hold(self._max_bytes))

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_REQUEST_BYTES:
            raise InvalidRequest(
                f"the images up to this one take {self._num_bytes} bytes after resizing; the limit for a request "
                f"is {MAX_REQUEST_BYTES}. Send fewer or smaller images, or lower media.max_image_tokens, which is "
                f"{self._loader.grid.max_tokens}"
            )

    def loaded(self) -> None:
        if self._hold is not None:
            self._hold.shrink(self._num_bytes)


def max_image_tokens(config: MediaConfig, grid: ImageGrid) -> int:
    """Return the most tokens of one image.

    It is independent of the rest of the request: if a conversation gains an image, earlier images stay the same, and so
    do their cached prefixes.
    """
    at_most = MAX_REQUEST_BYTES // grid.token_bytes
    return min(config.max_image_tokens or at_most // MIN_LARGEST_IMAGES, at_most)


def frames_of(video: CutVideo, number: int, grid: VideoGrid) -> tuple[ImagePatches, ...]:
    """Return the groups of frames of a video as images of the engine. number: of the video in its request."""
    num_tokens = math.prod(video.grid_hw) // grid.merge_size**2
    groups = zip(video.patches, video.content_hashes, video.times_s, strict=True)
    return tuple(
        ImagePatches(patches, (1, *video.grid_hw), num_tokens, content_hash, frame=FrameOfVideo(number, time_s))
        for patches, content_hash, time_s in groups
    )


def check_data_url(url: str, max_bytes: int, kind: str = "image") -> int:
    """Check form and size of `data:kind/...;base64,...` before copying it; return the index of the base64 text.

    Raises InvalidRequest.
    """
    start = url.find(",", 0, len("data:") + MAX_DATA_HEADER + 1) + 1
    if not start and len(url) > len("data:") + MAX_DATA_HEADER:
        raise InvalidRequest(f"the data: URL has no comma in its first {MAX_DATA_HEADER} characters")
    media_type, *parameters = url[len("data:") : max(start - 1, 0)].lower().split(";")
    if not start or "base64" not in parameters:
        raise InvalidRequest(f"the data: URL is not of the form data:{kind}/...;base64,...")
    if not media_type.startswith(f"{kind}/"):
        raise InvalidRequest(f"the data: URL has the media type {media_type[:64]!r}; expected {kind}/...")
    num_padding = url.count("=", max(start, len(url) - 2))
    if (num_bytes := (len(url) - start) * 3 // 4 - num_padding) > max_bytes:
        raise InvalidRequest(f"the image has {num_bytes} bytes; the limit is {max_bytes}")
    return start


def data_url_text(url: str, start: int) -> bytes:
    """Return the base64 text of a data: URL, which begins at `start`; raise InvalidRequest if it is not ASCII."""
    try:
        return url[start:].encode("ascii")
    except UnicodeEncodeError:
        raise InvalidRequest("the data: URL is not valid base64") from None
