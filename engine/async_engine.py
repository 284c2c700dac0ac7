"""The engine's door for asyncio: requests in, one stream of token chunks per request out."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace

from engine.config import EngineConfig
from engine.core.batch import ModelRunner
from engine.core.engine_core import EngineCore
from engine.core.scheduler import Chunks
from engine.device_thread import DeviceThread
from engine.protocol import (
    ContextLengthExceeded,
    EngineFailed,
    EngineRequest,
    EngineStatus,
    FinishReason,
    InvalidRequest,
    Overloaded,
    TokenChunk,
)
from engine.worker.model_runner import load_runner

log = logging.getLogger("orchard.engine")

RunnerFactory = Callable[[EngineConfig, Callable[[float], None]], ModelRunner]
"""Makes the runner on the device thread; the second argument takes the load's progress, 0 to 1."""


class _Stream:
    """What one request has produced and its reader has not taken yet. At most max_tokens token ids wait in it."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._finish: TokenChunk | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        return self._finish is not None

    def put(self, chunk: TokenChunk) -> None:
        """Nothing is taken after a finish reason: tokens of an aborted request may still be on their way."""
        if self._finish is not None:
            return
        self._token_ids.extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._finish = chunk
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> TokenChunk:
        """All that came since the last call, waiting for something to come."""
        if not self._token_ids and self._finish is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        token_ids, self._token_ids = tuple(self._token_ids), []
        if self._finish is None:
            return TokenChunk(token_ids)
        return TokenChunk(token_ids, self._finish.finish_reason, self._finish.error)


class AsyncEngine:
    """Loads its model at once, in its own thread. Belongs to the event loop that is running when it is made.

    `make_runner` is the seam between deciding and computing; the default loads `config.model` with MLX.
    """

    def __init__(self, config: EngineConfig, make_runner: RunnerFactory = load_runner):
        self.config = config
        self._make_runner = make_runner
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._streams: dict[str, _Stream] = {}
        self._keys: dict[str, str] = {}  # request id -> key of its stream, never the same twice: an id may come back
        self._serial = itertools.count()  # while the last tokens of its former use are still on their way
        self._core: EngineCore | None = None
        self._state, self._progress = "loading", 0.0
        self._error: str | None = None
        self._closing = False
        self._thread = DeviceThread(self._make_core, self._on_ready, self._on_end)
        self._thread.start()

    async def wait_ready(self) -> None:
        """Returns when the weights are in memory. Raises EngineFailed with the reason when they will not be."""
        await asyncio.shield(self._ready)

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenChunk]:
        """Yields every token exactly once, as many per chunk as there are, and the finish reason with the last.

        Closing or cancelling the iterator frees the row before the next step. Raises Overloaded when
        max_running + max_waiting requests are open, InvalidRequest for an id in use or an empty prompt,
        ContextLengthExceeded, EngineFailed when the engine is not ready.
        """
        self._admit(request)
        key = f"{request.request_id}#{next(self._serial)}"
        stream = self._streams[key] = _Stream()
        self._keys[request.request_id] = key
        self._thread.submit(lambda core: core.add_request(replace(request, request_id=key)))
        finished = False
        try:
            while not finished:
                chunk = await stream.get()
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            del self._streams[key], self._keys[request.request_id]
            if not finished:
                self._thread.submit(lambda core: core.abort(key))

    def abort(self, request_id: str) -> bool:
        """Ends the request with finish_reason ABORT; False when it is not known, or has ended already."""
        key = self._keys.get(request_id)
        if key is None or self._streams[key].is_finished:
            return False
        self._streams[key].put(TokenChunk((), FinishReason.ABORT))
        self._thread.submit(lambda core: core.abort(key))
        return True

    def status(self) -> EngineStatus:
        core = self._core
        status = EngineStatus(
            state=self._state,
            model=self.config.model,
            load_progress=self._progress,
            max_running=self.config.max_running,
            max_waiting=self.config.max_waiting,
            error=self._error,
        )
        if core is None:
            return status
        counters = asdict(core.stats)
        del counters["failed_steps_in_a_row"]
        return replace(
            status,
            num_running=core.scheduler.num_running,
            num_waiting=core.scheduler.num_waiting,
            max_context_tokens=core.runner.max_context_tokens,
            memory=core.memory,
            capabilities=core.runner.capabilities,
            **counters,
        )

    def check_health(self) -> None:
        """Raises EngineFailed when the engine can not serve and will not recover by itself."""
        if self._error is not None:
            raise EngineFailed(self._error)
        age_s = self._thread.step_age_s
        if age_s > self.config.step_timeout_s:
            raise EngineFailed(f"a step has lasted {age_s:.0f} s, the limit is {self.config.step_timeout_s:.0f} s")
        failed = self._core.stats.failed_steps_in_a_row if self._core else 0
        if failed >= self.config.max_failed_steps:
            raise EngineFailed(f"{failed} steps in a row failed, the limit is {self.config.max_failed_steps}")

    async def shutdown(self, timeout_s: float = 30.0) -> None:
        """Ends after the step that is running, and takes nothing more; open streams end with ERROR."""
        self._closing = True
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, timeout_s):
            self._ended(EngineFailed(f"the step that was running did not end within {timeout_s:.0f} s"))

    def _admit(self, request: EngineRequest) -> None:
        if self._core is None or self._closing:
            raise EngineFailed(
                self._error or f"the engine is not ready: it is {'shutting down' if self._closing else self._state}"
            )
        if request.request_id in self._keys:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        if not len(request.token_ids):
            raise InvalidRequest("the prompt has 0 tokens, it needs at least 1", "messages")
        low, high = int(request.token_ids.min()), int(request.token_ids.max())
        vocab_size = self._core.runner.vocab_size
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"token id {wrong} is not within 0 and {vocab_size - 1}", "messages")
        limit = self._core.runner.max_context_tokens
        if len(request.token_ids) + request.sampling.max_tokens > limit:
            raise ContextLengthExceeded(len(request.token_ids), request.sampling.max_tokens, limit)
        open_limit = self.config.max_running + self.config.max_waiting
        if len(self._streams) >= open_limit:
            raise Overloaded(
                f"{len(self._streams)} requests are open, the limit is {open_limit} "
                f"({self.config.max_running} running, {self.config.max_waiting} waiting)",
                retry_after_s=1.0,
            )

    # On the device thread.

    def _make_core(self) -> EngineCore:
        return EngineCore(self.config, self._make_runner(self.config, self._set_progress), self._publish)

    def _set_progress(self, progress: float) -> None:
        self._progress = progress

    def _publish(self, chunks: Chunks) -> None:
        """One wake-up of the loop per step, whatever the number of rows."""
        self._call(self._deliver, chunks)

    def _on_ready(self, core: EngineCore) -> None:
        self._call(self._became_ready, core)

    def _on_end(self, error: BaseException | None) -> None:
        self._call(self._ended, error)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._loop.call_soon_threadsafe(callback, *args)

    # On the event loop.

    def _deliver(self, chunks: Chunks) -> None:
        for request_id, chunk in chunks.items():
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put(chunk)

    def _became_ready(self, core: EngineCore) -> None:
        if self._closing:
            return
        self._core, self._state, self._progress = core, "ready", 1.0
        if not self._ready.done():
            self._ready.set_result(None)

    def _ended(self, error: BaseException | None) -> None:
        if self._state in ("failed", "stopped"):
            return
        self._core, self._state = None, "failed" if error else "stopped"
        self._error = f"{type(error).__name__}: {error}" if error else "the engine was shut down"
        for stream in self._streams.values():
            stream.put(TokenChunk((), FinishReason.ERROR, self._error))
        if not self._ready.done():
            self._ready.set_exception(EngineFailed(self._error))
            self._ready.exception()  # read here, in case nobody waits for it
