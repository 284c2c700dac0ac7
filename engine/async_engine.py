"""The engine's asyncio interface: takes requests, returns one stream of token chunks per request."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from engine import retry_after
from engine.config import EngineConfig
from engine.core.batch import ModelRunner
from engine.core.engine_core import EngineCore
from engine.core.progress import Work
from engine.core.request import Matcher
from engine.core.request_check import check_plan, check_pooling, check_request
from engine.core.scheduler import Chunks
from engine.core.stats import Stats
from engine.device_thread import DeviceThread
from engine.grammar_compilers import GrammarCompilers
from engine.host_memory import HostMemory
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.pinned import pinned_requests
from engine.processing.thought_matcher import ThoughtMatcher, ThoughtRules
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import (
    HEARTBEAT,
    CacheCleared,
    CachedPrefix,
    CacheStatus,
    EngineFailed,
    EngineRequest,
    EngineStatus,
    FinishReason,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    TokenChunk,
    Unavailable,
    WorkInHand,
)
from engine.snapshot_store.files import SnapshotFiles, SnapshotLost
from engine.token_stream import TokenStream
from engine.worker.model_runner import load_runner

log = logging.getLogger("orchard.engine")

CLEAR_TIMEOUT_S = 30.0
WATCH_PERIOD_S = 0.5
HUNG_JOIN_S = 1.0
"""How long shutdown waits for a device thread that hangs."""

T = TypeVar("T")

RunnerFactory = Callable[[EngineConfig, Callable[[float], None]], ModelRunner]
"""Creates the runner on the device thread; the second argument receives the load progress, 0 to 1."""


class AsyncEngine:
    """Runs an engine on a device thread of its own. Belongs to the event loop that is running when it is constructed.

    Loading starts at once.

    Args:
        config: The engine's configuration.
        make_runner: Creates the runner; loads `config.model` with MLX by default.
    """

    def __init__(self, config: EngineConfig, make_runner: RunnerFactory = load_runner):
        self.config = config
        self._make_runner = make_runner
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._streams: dict[str, TokenStream] = {}
        self._pixel_bytes: dict[str, int] = {}  # bytes of each stream's images, kept in case its rows are preempted
        self._keys: dict[str, str] = {}  # request id -> unique key of its stream: an id may be reused while the
        self._serial = itertools.count()  # last tokens of its earlier request are still in flight
        self._grammars = GrammarCompilers(config)
        self._core: EngineCore | None = None
        self._state, self._progress = "loading", 0.0
        self._num_pinned_tokens = 0
        self._questions: set[asyncio.Future[Any]] = set()  # pending calls to the device thread
        self._error: str | None = None
        self._closing = self._drains = self._is_hung = False
        self._late: Work | None = None  # the last work reported as late
        self._unavailable: str | None = None  # why new requests are rejected
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        min_gb = config.memory.min_available_gb
        self._host_memory = HostMemory(None if min_gb is None else int(min_gb * 2**30))
        self._watching: asyncio.Task[None] | None = None
        self._thread = DeviceThread(self._make_core, self._on_ready, self._on_end)
        self._thread.start()

    async def wait_ready(self) -> None:
        """Wait until the weights are loaded and pinned prompts are prefilled.

        Raises:
            EngineFailed: Loading failed; the message has the reason.
        """
        await asyncio.shield(self._ready)

    async def generate(
        self, request: EngineRequest, heartbeat_period_s: float | None = None
    ) -> AsyncIterator[TokenChunk]:
        """Yield every token of every choice exactly once, and each choice's finish reason in its last chunk.

        Closing or cancelling the iterator frees the rows before the next chunk or step.

        Args:
            request: The request.
            heartbeat_period_s: Yield a HEARTBEAT after this many seconds without other output, for whatever reason;
                None: never.

        Raises:
            Overloaded: max_running + max_queue choices or image_memory_mb of pixels are open.
            QueueTimeout: The request waited in the queue for too long; raised before the first token.
            InvalidRequest: The engine cannot serve the request as asked.
            ContextLengthExceeded: Prompt and output do not fit into the context.
            MemoryExceeded: Prompt and output do not fit into the memory.
            Unavailable: The engine is not ready, draining, or short of memory.
        """
        core = self._admit(request)
        request = core.clamp_max_tokens(request)
        key = f"{request.request_id}#{next(self._serial)}"
        stream = self._streams[key] = TokenStream(request.num_choices)
        self._keys[request.request_id] = key
        self._pixel_bytes[key] = request.num_pixel_bytes
        self._no_streams.clear()
        compiling = asyncio.ensure_future(self._matchers(request, core))
        compiling.add_done_callback(lambda task: task.cancelled() or task.exception())  # marked as retrieved
        try:
            while not await stream.settled(compiling, heartbeat_period_s):
                yield HEARTBEAT
            matchers = compiling.result() if compiling.done() else None
            if matchers is not None and not stream.is_finished:
                self._thread.submit(lambda core: core.add_request(replace(request, request_id=key), matchers))
            num_open = request.num_choices
            while num_open:
                chunks = await stream.get(heartbeat_period_s)
                if not chunks:
                    yield HEARTBEAT
                for chunk in chunks:
                    if chunk.finish_reason is FinishReason.EXPIRED:  # all choices expire together, before any token
                        raise QueueTimeout(f"The request {chunk.error}.", chunk.retry_after_s or retry_after.ENGINE_S)
                    num_open -= chunk.finish_reason is not None
                    yield chunk
        finally:
            compiling.cancel()
            del self._streams[key], self._keys[request.request_id], self._pixel_bytes[key]
            if not self._streams:
                self._no_streams.set()
            if not stream.is_finished:
                self._thread.submit(lambda core: core.abort(key))

    def abort(self, request_id: str) -> bool:
        """End a request with finish_reason ABORT. Return False if it is unknown or has finished."""
        key = self._keys.get(request_id)
        if key is None or self._streams[key].is_finished:
            return False
        self._streams[key].end(FinishReason.ABORT)
        self._thread.submit(lambda core: core.abort(key))
        return True

    def status(self) -> EngineStatus:
        """Return the engine's state and figures."""
        core = self._core
        status = EngineStatus(
            state=self._state,
            model=self.config.model,
            load_progress=self._progress if self._state != "warming" else self._pinned_progress,
            max_running=self.config.max_running,
            max_queue=self.config.max_queue,
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
            memory=core.memory | {"image_pixels_bytes": sum(self._pixel_bytes.values())},
            admission=core.admission,
            queue=tuple(replace(one, request_id=one.request_id.rpartition("#")[0]) for one in core.queue),
            expected_wait_s=core.scheduler.expected_wait_s(),
            unavailable=self._unavailable,
            speculation=core.speculation_status,
            capabilities=core.runner.capabilities,
            work=self._work_in_hand(core),
            **counters,
        )

    def _work_in_hand(self, core: EngineCore) -> WorkInHand | None:
        work, seconds = core.progress.work, self._thread.step_age_s
        return WorkInHand(work.name, seconds, work.predicted_s, work.is_late(seconds)) if seconds else None

    def check_health(self) -> None:
        """Check that the engine serves or will recover by itself.

        Raises:
            EngineFailed: It has failed, its device hangs, or too many steps in a row failed.
        """
        if self._error is not None:
            raise EngineFailed(self._error)
        if (error := self._watched()) is not None:
            raise EngineFailed(error)
        failed = self._core.stats.failed_steps_in_a_row if self._core else 0
        if failed >= self.config.max_failed_steps:
            limit = self.config.max_failed_steps
            raise EngineFailed(f"{failed} consecutive steps failed; the limit is {limit} (max_failed_steps)")

    async def cached_prefix(self, request: EngineRequest) -> CachedPrefix:
        """Return the cached prefix of a prompt, for planning a sparse prefill.

        Raises:
            EngineFailed: The engine is not ready.
        """
        return await self._ask(
            lambda core: CachedPrefix(core.prefix.lookup.peek(request), core.runner.no_sparse, core.costs.prefill)
        )

    async def cache_status(self) -> CacheStatus:
        """Return the status of the prefix cache.

        Raises:
            EngineFailed: The engine is not ready.
        """
        status = await self._ask(lambda core: core.prefix.status())
        misses = [replace(miss, request_id=miss.request_id.rpartition("#")[0]) for miss in status.recent_misses]
        return replace(status, recent_misses=tuple(misses))

    async def clear_cache(self) -> CacheCleared:
        """Remove every snapshot that is not pinned, and all files of the disk tier.

        Raises:
            EngineFailed: The engine is not ready, or files could not be removed in time.
        """
        cleared, num_files = await self._ask(lambda core: (core.prefix.clear(), core.prefix.clear_files()))
        if num_files is None:
            return cleared
        try:
            async with asyncio.timeout(CLEAR_TIMEOUT_S):
                return replace(cleared, num_files=await asyncio.wrap_future(num_files))
        except (SnapshotLost, TimeoutError) as error:
            reason = str(error) or f"their removal takes longer than {CLEAR_TIMEOUT_S:.0f} s"
            raise EngineFailed(f"the cache in memory is cleared, but files could not be removed: {reason}") from None

    async def drain(self, timeout_s: float) -> None:
        """Reject new requests, and wait until open ones have finished.

        Args:
            timeout_s: Seconds after which open requests end with an error.
        """
        self._drains, self._unavailable = True, "the engine is shutting down"
        try:
            async with asyncio.timeout(timeout_s):
                await self._no_streams.wait()
        except TimeoutError:
            error = f"the engine is shutting down, and the answer took longer than {timeout_s:g} s"
            for key, stream in self._streams.items():
                stream.end(FinishReason.ERROR, error, retry_after.ENGINE_S)
                self._thread.submit(lambda core, key=key: core.abort(key))

    async def shutdown(self, timeout_s: float = 30.0) -> None:
        """Stop after the running step; open streams end with ERROR."""
        self._closing = True
        if self._watching is not None:
            self._watching.cancel()
        self._thread.stop()
        timeout_s = min(timeout_s, HUNG_JOIN_S) if self._is_hung else timeout_s
        if not await asyncio.to_thread(self._thread.join, timeout_s):
            self._ended(EngineFailed(f"the step that was running did not end within {timeout_s:.0f} s"))
        self._grammars.close()

    def _admit(self, request: EngineRequest) -> EngineCore:
        """Return the core that will serve the request. Raises what `generate` raises."""
        if self._core is None or self._closing:
            raise Unavailable(
                self._error or f"the engine is not ready: it is {'shutting down' if self._closing else self._state}",
                retry_after.ENGINE_S,
            )
        if self._unavailable is not None:
            raise Unavailable(self._unavailable, retry_after.ENGINE_S)
        if request.request_id in self._keys:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        runner = self._core.runner
        check_request(request, self.config, runner.vocab_size, runner.max_context_tokens)
        check_plan(request, runner.no_sparse)
        check_pooling(request, runner.no_pooling)
        num_open = sum(
            max(stream.num_open, 1) for stream in self._streams.values()
        )  # streams that are finished but not closed count as well
        limit = self.config.max_running + self.config.max_queue
        if num_open + request.num_choices > limit:
            raise Overloaded(
                f"{num_open} choices are open and the request has {request.num_choices}; the limit is {limit} "
                f"(max_running {self.config.max_running} + max_queue {self.config.max_queue})",
                retry_after_s=self._core.scheduler.expected_wait_s() or retry_after.ENGINE_S,
            )
        self._check_pixels(request, self._core)
        return self._core

    def _check_pixels(self, request: EngineRequest, core: EngineCore) -> None:
        """Raise Overloaded if the images of all open requests would exceed image_memory_mb."""
        held, limit = sum(self._pixel_bytes.values()), self.config.image_memory_mb * 2**20
        if held and held + request.num_pixel_bytes > limit:
            raise Overloaded(
                f"the images of open requests take {held} bytes and those of this request {request.num_pixel_bytes}; "
                f"the limit is {limit} bytes (image_memory_mb)",
                retry_after_s=core.scheduler.expected_wait_s() or retry_after.ENGINE_S,
            )

    async def _matchers(self, request: EngineRequest, core: EngineCore) -> list[Matcher]:
        """Compile one matcher per choice off the device thread; empty if the output is unconstrained."""
        thought, vocab_size, grammar = request.thought, core.runner.vocab_size, None
        if request.grammar is not None:
            compiler = await self._grammars.get(request.stop_token_ids, vocab_size)
            grammar = await compiler.compile(request.grammar)
        matcher: Matcher | None = grammar
        if thought is not None and (grammar is not None or thought.budget is not None):
            rules = ThoughtRules(thought, request.stop_token_ids, vocab_size, has_grammar=grammar is not None)
            matcher = ThoughtMatcher(rules, grammar)
        return [] if matcher is None else [matcher, *(matcher.fork() for _ in range(1, request.num_choices))]

    async def _ask(self, question: Callable[[EngineCore], T]) -> T:
        """Run a function on the device thread, between two pieces of work, and return its result.

        Raises:
            EngineFailed: The engine is not ready, or the function failed.
        """
        if self._core is None or self._closing:
            raise EngineFailed(self._error or f"the engine is not ready: it is {self._state}")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._questions.add(answer)
        try:
            self._thread.submit(lambda core: self._answer(answer, core, question))
            return await answer
        finally:
            self._questions.discard(answer)

    async def _take_in_pinned(self) -> None:
        """Prefill the pinned prompts; then the engine is ready."""
        if self.config.prefix_cache.pinned:
            requests = await asyncio.to_thread(_make_pinned, self.config)
            self._num_pinned_tokens = sum(len(request.token_ids) for request in requests)
            self._state = "warming" if self._core is not None else self._state
            for i, request in enumerate(requests):
                await self._take_in(request)
                log.info("pinned prompt %d of %d is prefilled: %d tokens", i + 1, len(requests), len(request.token_ids))
        if self._core is not None:  # the engine may have failed meanwhile
            self._state = "ready"
            self._ready.set_result(None)

    async def _take_in(self, request: EngineRequest) -> None:
        """Prefill a pinned prompt.

        Raises:
            EngineFailed: Its system part is not pinned afterwards.
        """
        chunks = [chunk async for chunk in self.generate(request)]
        status = await self.cache_status()
        if not any(entry.pinned and entry.num_tokens == len(request.token_ids) - 1 for entry in status.entries):
            refused = (
                f"{status.num_rejected} snapshots were rejected; the limit of the cache is {status.max_bytes} bytes "
                "(prefix_cache.max_gb)"
            )
            reason = chunks[-1].error or status.off_reason or refused
            raise EngineFailed(f"{request.request_id} ({len(request.token_ids)} tokens) cannot be pinned: {reason}")

    # On the device thread.

    def _make_core(self) -> EngineCore:
        runner, disk = self._make_runner(self.config, self._set_progress), self.config.prefix_cache.disk
        try:
            if disk is not None and runner.no_snapshots is not None:
                raise EngineFailed(f"prefix_cache.disk has no effect with this model: {runner.no_snapshots}")
            files = SnapshotFiles(disk, runner.fingerprint) if disk is not None else None
            return EngineCore(self.config, runner, self._publish, files=files, poll=self._thread.poll)
        except BaseException:
            runner.close()
            raise

    def _answer(self, answer: asyncio.Future[T], core: EngineCore, question: Callable[[EngineCore], T]) -> None:
        try:
            self._call(_set_result, answer, question(core))
        except Exception as error:  # must not end the device thread
            log.exception("a call on the device thread failed")
            self._call(_set_error, answer, EngineFailed(f"a call on the device thread failed: {type(error).__name__}"))

    def _set_progress(self, progress: float) -> None:
        self._progress = progress

    def _publish(self, chunks: Chunks) -> None:
        """Deliver all rows' chunks with one wake-up of the event loop per step."""
        self._call(self._deliver, chunks)

    def _on_ready(self, core: EngineCore) -> None:
        self._call(self._became_ready, core)

    def _on_end(self, error: BaseException | None) -> None:
        self._call(self._ended, error)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    # On the event loop.

    @property
    def _pinned_progress(self) -> float:
        stats = self._core.stats if self._core is not None else Stats()
        return min(1.0, (stats.num_prompt_tokens + stats.num_cached_tokens) / self._num_pinned_tokens)

    def _deliver(self, chunks: Chunks) -> None:
        for row_id, chunk in chunks.items():
            stream = self._streams.get(row_id.rpartition("/")[0])
            if stream is not None:
                stream.put(chunk)

    def _became_ready(self, core: EngineCore) -> None:
        if self._closing:
            return
        self._core, self._progress = core, 1.0
        self._watching = asyncio.ensure_future(self._watch())
        self._warming = asyncio.ensure_future(self._take_in_pinned())
        self._warming.add_done_callback(self._warmed)

    def _warmed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ended(error)
            self._thread.stop()

    async def _watch(self) -> None:
        """Fail the engine if its device hangs, and reject new requests while the machine is short of memory."""
        while self._error is None:
            await asyncio.sleep(WATCH_PERIOD_S)
            if (error := self._watched()) is not None:
                self._is_hung = True
                self._ended(EngineFailed(error))
                self._thread.stop()
            elif not self._drains:
                shortage = self._host_memory.shortage()
                if shortage is not None and self._unavailable is None:
                    log.error("new requests are rejected: %s", shortage)
                    self._thread.submit(lambda core: core.free_evictable())
                self._unavailable = shortage

    def _watched(self) -> str | None:
        """Log late work once; return an error message if the device hangs, else None."""
        if self._core is None:
            return None
        work = self._core.progress.work  # read before its age: work that begins meanwhile is younger
        age_s, limit_s = self._thread.step_age_s, work.limit_s(self.config.step_timeout_s)
        predicted = f", predicted {work.predicted_s:.2g} s" if work.predicted_s else ""
        so_far = f"{work.name} has been running for {age_s:.1f} s{predicted}"
        if work.is_late(age_s) and work is not self._late:
            self._late = work
            log.warning(so_far)
        return f"{so_far}; the limit is {limit_s:g} s" if age_s > limit_s else None

    def _ended(self, error: BaseException | None) -> None:
        if self._state in ("failed", "stopped"):
            return
        self._core, self._state = None, "failed" if error else "stopped"
        self._error = f"{type(error).__name__}: {error}" if error else "the engine was shut down"
        for stream in self._streams.values():
            stream.end(FinishReason.ERROR, self._error, retry_after.ENGINE_S)
        for question in self._questions:
            _set_error(question, EngineFailed(self._error))
        if not self._ready.done():
            self._ready.set_exception(EngineFailed(self._error))
            self._ready.exception()  # marks it as retrieved, in case wait_ready is never called


def _make_pinned(config: EngineConfig) -> list[EngineRequest]:
    tokenizer = ChatTokenizer(resolve_checkpoint(config.model, config.revision, weights=False))
    return pinned_requests(config.prefix_cache.pinned, tokenizer)


def _set_result(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _set_error(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
