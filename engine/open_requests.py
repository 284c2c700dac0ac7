"""The requests that an engine has accepted and whose output is not read to its end, and the limits on them."""

import asyncio
import itertools
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import InvalidRequest, Overloaded
from engine.protocol import EngineRequest, FinishReason
from engine.token_stream import TokenStream


class OpenRequests:
    """The streams of the open requests of an engine. Belongs to an event loop.

    Args:
        config: The limits.

    Attributes:
        streams: Each request's stream by its key, which is unique: a request id may be used again while the last tokens
            of its earlier request are still in flight.
        compiling: Keys of the streams whose requests the device thread does not have yet.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self.streams: dict[str, TokenStream] = {}
        self.compiling = set[str]()
        self._keys: dict[str, str] = {}  # by request id
        self._pixel_bytes: dict[str, int] = {}  # of each stream's images, kept in case its rows are preempted
        self._serial = itertools.count()
        self._are_closed = asyncio.Event()
        self._are_closed.set()

    @property
    def num_choices(self) -> int:
        """Open choices; streams that are finished but not closed count as well."""
        return sum(max(stream.num_open, 1) for stream in self.streams.values())

    @property
    def num_pixel_bytes(self) -> int:
        """Bytes of the images of all open requests."""
        return sum(self._pixel_bytes.values())

    def check_room(self, request: EngineRequest, predict_wait: Callable[[], float]) -> None:
        """Check that a request may be opened.

        Args:
            request: The request.
            predict_wait: Returns the seconds after which a refused client may try again.

        Raises:
            InvalidRequest: Its id is in use.
            Overloaded: max_running + max_queue choices or image_memory_mb of pixels are open.
        """
        if request.request_id in self._keys:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        config, num_open, num_more = self._config, self.num_choices, len(request.open_choices)
        limit = config.max_running + config.max_queue
        if num_open + num_more > limit:
            raise Overloaded(
                f"{num_open} choices are open and the request has {num_more}; the limit is {limit} "
                f"(max_running {config.max_running} + max_queue {config.max_queue})",
                retry_after_s=predict_wait(),
                limit="max_queue",
            )
        num_bytes, num_more, limit = self.num_pixel_bytes, request.num_pixel_bytes, config.image_memory_mb * 2**20
        if num_more and num_bytes and num_bytes + num_more > limit:
            raise Overloaded(
                f"the images of open requests take {num_bytes} bytes and those of this request {num_more}; the "
                f"limit is {limit} bytes (image_memory_mb)",
                retry_after_s=predict_wait(),
                limit="image_memory_mb",
            )

    def open(self, request: EngineRequest) -> tuple[str, TokenStream]:
        """Open a request that `check_room` lets pass; return the key of its stream, and the stream."""
        key = f"{request.request_id}#{next(self._serial)}"
        stream = self.streams[key] = TokenStream(request.num_choices, request.open_choices)
        self.compiling.add(key)
        self._keys[request.request_id] = key
        self._pixel_bytes[key] = request.num_pixel_bytes
        self._are_closed.clear()
        return key, stream

    def close(self, key: str) -> None:
        """Forget a request whose output is read to its end, or is no longer read."""
        self.compiling.discard(key)
        del self.streams[key], self._keys[request_id_of(key)], self._pixel_bytes[key]
        if not self.streams:
            self._are_closed.set()

    async def wait_closed(self) -> None:
        """Wait until no request is open."""
        await self._are_closed.wait()

    def key_of(self, request_id: str) -> str | None:
        """Return the key of a request's stream; None if it is unknown or has finished."""
        key = self._keys.get(request_id)
        return None if key is None or self.streams[key].is_finished else key

    def end(self, error: str, retry_after_s: float) -> None:
        """End all choices that have not finished with an error."""
        for stream in self.streams.values():
            stream.end(FinishReason.ERROR, error, retry_after_s)


def request_id_of(key: str) -> str:
    """Return the request id of a stream's key."""
    return key.rpartition("#")[0]
