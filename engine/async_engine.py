"""The engine's asyncio interface: takes requests, returns one stream of token chunks per request."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from typing import Any

from engine import retry_after
from engine.async_device_thread import AsyncDeviceThread
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.quoting.quoter import ESTIMATE_MARGIN
from engine.core.request_check import check_request
from engine.core.runner import ModelRunner
from engine.core.scheduler_output import Published
from engine.ended_rows import EndedRows
from engine.errors import EngineFailed, QueueTimeout, Unavailable
from engine.figures import EngineFigures
from engine.grammar_compilers import GrammarCompilers
from engine.host_memory import total_bytes
from engine.open_requests import OpenRequests, request_id_of
from engine.pinned_prompts import PinnedPrompts
from engine.placement import Question, Quote, Refusal
from engine.protocol import HEARTBEAT, CachedPrefix, EngineRequest, FinishReason, TokenChunk
from engine.snapshot_store.exchange import Sharing, SnapshotExchange
from engine.snapshot_store.files import SnapshotFiles, SnapshotLost
from engine.status import CacheCleared, CacheStatus, EngineStatus, FetchStatus
from engine.take_over import SnapshotTakeOver
from engine.watchdog import Watchdog
from engine.worker.runner_factory import make_runner as runner_of_model

log = logging.getLogger("orchard.engine")

CLEAR_TIMEOUT_S = 30.0
HUNG_JOIN_S = 1.0
"""How long shutdown waits for a device thread that hangs."""

MESSAGE_S = 1e-3
"""Shortest time between two chunks of a request, per row that decodes: the processes between engine and client take up
to a millisecond per message. The first and the last chunk of a choice are never held back."""

MAX_GAP_S = 0.1
"""Longest time for which chunks are held back for that. A row decodes as much longer behind its stop string."""

PACE_TOKENS = 2048
"""Tokens of the prompt by whose predicted seconds engines are compared."""

RunnerFactory = Callable[[EngineConfig, Callable[[float], None]], ModelRunner]
"""Creates the runner on the device thread; the second argument receives the share of the weights that is read,
up to 1, and then that of the warm-up, which compiles kernels, from 0 to 1."""


class AsyncEngine:
    """Runs an engine on a device thread of its own. Belongs to the event loop that is running when it is constructed.

    Loading starts at once.

    Args:
        config: The engine's configuration.
        make_runner: Creates the runner; loads `config.model` with MLX by default.
        sharing: How snapshots are exchanged with other nodes, unless `prefix_cache.fetch` is off or there is no disk
            tier; None: they are not.

    Attributes:
        ended: Timelines of the choices that have ended.
        take_over: Gives snapshots to other nodes, and takes theirs over, before a prompt asks for them.
    """

    def __init__(
        self, config: EngineConfig, make_runner: RunnerFactory = runner_of_model, sharing: Sharing | None = None
    ):
        self.config = config
        self._make_runner = make_runner
        self._sharing = None if config.prefix_cache.fetch == "off" else sharing
        self._exchange: SnapshotExchange | None = None
        self._open = OpenRequests(config)
        self.ended = EndedRows()
        self._grammars = GrammarCompilers(config)
        self._pinned = PinnedPrompts(config, self.generate, self.cache_status)
        self._load_progress = 0.0
        self._is_draining = self._has_left = False
        self._thread = AsyncDeviceThread("the engine", self._make_core, self._end_streams, self._warm_up)
        self._watchdog = Watchdog(config, self._thread)
        self.take_over = SnapshotTakeOver(
            self._thread,
            exchange=lambda: self._exchange,
            is_idle=lambda: not self._open.streams,
            is_leaving=lambda: self._is_draining or self._has_left,
        )
        self._thread.start()

    async def wait_ready(self) -> None:
        """Wait until the weights are loaded and pinned prompts are prefilled.

        Raises:
            EngineFailed: Loading failed; the message has the reason.
        """
        await self._thread.wait_ready()

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
        arrived_s, core = time.monotonic(), self._core_for(request)
        request = core.budget.needs.clamp_max_tokens(request, core.figures.pinned_bytes)
        key, stream = self._open.open(request)
        core.quoter.bookings.sent(request.request_id, key)
        compiling = asyncio.ensure_future(self._grammars.matchers(request, core.runner.vocab_size))
        compiling.add_done_callback(lambda task: task.cancelled() or task.exception())  # marked as retrieved
        try:
            while not await stream.settled(compiling, heartbeat_period_s):
                yield HEARTBEAT
            matchers = compiling.result() if compiling.done() else None
            if matchers is not None and not stream.is_finished:
                named = replace(request, request_id=key)
                self._open.compiling.discard(key)
                self._thread.submit(lambda core: core.add_request(named, matchers, arrived_s))
            num_open = len(request.open_choices)
            while num_open:
                chunks = await stream.get(
                    heartbeat_period_s, gap_s=min(MESSAGE_S * core.scheduler.num_decoding, MAX_GAP_S)
                )
                if not chunks:
                    yield HEARTBEAT
                for chunk in chunks:
                    if chunk.finish_reason is FinishReason.EXPIRED:  # all choices expire together, before any token
                        wait_s = chunk.retry_after_s or retry_after.ENGINE_S
                        raise QueueTimeout(f"The request {chunk.error}.", wait_s, "queue_timeout_s")
                    num_open -= chunk.finish_reason is not None
                    yield chunk
        finally:
            compiling.cancel()
            core.quoter.bookings.remove(key)
            self._open.close(key)
            if not stream.is_finished:
                self._thread.submit(lambda core: core.abort(key))

    def abort(self, request_id: str) -> bool:
        """End a request with finish_reason ABORT. Return False if it is unknown or has finished."""
        if (key := self._open.key_of(request_id)) is None:
            return False
        self._open.streams[key].end(FinishReason.ABORT)
        self._thread.submit(lambda core: core.abort(key))
        return True

    def quote(self, question: Question) -> Quote:
        """Predict the seconds of a request, if it were placed here now; waits for no step."""
        core, refusal = self._thread.worker, self._refusal(question)
        if core is None:
            return Quote(refusal=refusal)
        return core.quoter.quote(question) if refusal is None else core.quoter.refuse(question, refusal)

    def book(self, question: Question) -> Quote | None:
        """Count a request as queued until it arrives with the question's request id, for BOOKING_S at most.

        Returns:
            None if it is booked. A new quote, and no booking, if the request is refused or its wait has grown since the
            last quote; to book it nevertheless, call again.
        """
        core, refusal = self._thread.worker, self._refusal(question)
        return Quote(refusal=refusal) if core is None or refusal is not None else core.quoter.book(question)

    def status(self) -> EngineStatus:
        """Return the engine's state and figures."""
        core, state = self._thread.worker, self._thread.state
        status = EngineStatus(
            state=state,
            model=self.config.model,
            load_progress=self._pinned.progress(core.stats) if core and state == "warming" else self._load_progress,
            max_running=self.config.max_running,
            max_queue=self.config.max_queue,
            error=self._thread.error,
        )
        if core is None:
            return status
        return replace(
            status,
            num_running=core.scheduler.num_running,
            num_waiting=core.scheduler.num_waiting,
            max_context_tokens=core.runner.max_context_tokens,
            memory=core.figures.memory | {"image_pixels_bytes": self._open.num_pixel_bytes},
            admission=core.figures.admission,
            queue=tuple(replace(one, request_id=request_id_of(one.request_id)) for one in core.figures.waiting),
            expected_wait_s=core.scheduler.expected_wait_s(),
            unavailable=self._unavailable,
            speculation=core.figures.speculation,
            capabilities=core.runner.capabilities,
            work=self._watchdog.work_in_hand(core),
            **asdict(core.stats),
        )

    def figures(self) -> EngineFigures:
        """Return the figures for metrics; waits for no step."""
        core = self._thread.worker
        available = self._watchdog.available_bytes
        if core is None:
            return EngineFigures(status=self.status(), available_bytes=available, total_bytes=total_bytes())
        store = core.prefixes.store
        return EngineFigures(
            status=self.status(),
            requests=core.scheduler.figures.snapshot(),
            cache=replace(store.counters, misses=dict(store.counters.misses)),
            disk=core.prefixes.disk_status(),
            fetch=self._fetch_status(),
            num_decoding=core.scheduler.num_decoding,
            num_snapshots=len(store),
            num_late=self._watchdog.num_late,
            available_bytes=available,
            total_bytes=total_bytes(),
        )

    def placement_facts(self) -> dict[str, Any]:
        """Return what does not change while the engine runs, for the placement of requests.

        Returns:
            `room_bytes` for rows and snapshots, `max_context_tokens`, `pace_s`, the predicted seconds of a prompt of
            PACE_TOKENS tokens, and `snapshots`, the address at which other nodes fetch snapshots; '' without one.

        Raises:
            EngineFailed: The engine is not ready.
        """
        core = self._thread.worker
        if core is None:
            raise EngineFailed(self._thread.unavailable_reason or "the engine is not ready")
        return {
            "room_bytes": core.budget.needs.request_bytes,
            "max_context_tokens": core.runner.max_context_tokens,
            "pace_s": core.costs.prompt_s(0, PACE_TOKENS),
            "snapshots": "" if self._exchange is None else self._exchange.address,
        }

    def check_health(self) -> None:
        """Check that the engine serves or will recover by itself.

        Raises:
            EngineFailed: It has failed, its device hangs, or too many steps in a row failed.
        """
        if (error := self._thread.error or self._watchdog.hang()) is not None:
            raise EngineFailed(error)
        core = self._thread.worker
        failed = core.failed_steps_in_a_row if core else 0
        if failed >= self.config.max_failed_steps:
            limit = self.config.max_failed_steps
            raise EngineFailed(f"{failed} consecutive steps failed; the limit is {limit} (max_failed_steps)")

    async def cached_prefix(self, request: EngineRequest) -> CachedPrefix:
        """Return the cached prefix of a prompt, for planning a sparse prefill.

        Raises:
            EngineFailed: The engine is not ready.
        """
        return await self._thread.call(
            lambda core: CachedPrefix(core.prefixes.peek(request), core.runner.no_sparse, core.costs.prefill)
        )

    async def cache_status(self) -> CacheStatus:
        """Return the status of the prefix cache.

        Raises:
            EngineFailed: The engine is not ready.
        """
        status = await self._thread.call(lambda core: core.prefixes.status())
        misses = [replace(miss, request_id=request_id_of(miss.request_id)) for miss in status.recent_misses]
        return replace(status, recent_misses=tuple(misses), fetch=self._fetch_status())

    async def clear_cache(self) -> CacheCleared:
        """Remove every snapshot that is not pinned, and all files of the disk tier.

        Raises:
            EngineFailed: The engine is not ready, or files could not be removed in time.
        """
        cleared, num_files = await self._thread.call(lambda core: (core.prefixes.clear(), core.prefixes.clear_files()))
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
        self._is_draining = self._watchdog.ignores_memory = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._open.wait_closed()
        except TimeoutError:
            error = f"the engine is shutting down, and the answer took longer than {timeout_s:g} s"
            for key, stream in self._open.streams.items():
                stream.end(FinishReason.ERROR, error, retry_after.ENGINE_S)
                self._thread.submit(lambda core, key=key: core.abort(key))

    async def move_all(self) -> None:
        """End all open choices with MOVED, and reject new requests until `take_requests`; `drain` may follow.

        A choice has the tokens of its chunks, and another engine continues it from them (EngineRequest.progress). The
        states of its row and of its prompt stay in the prefix cache, where there is room. Returns once that is done.

        Raises:
            EngineFailed: The engine is not ready, or failed.
        """
        self._has_left = True
        for key in self._open.compiling:
            self._open.streams[key].end(FinishReason.MOVED)
        await self._thread.call(lambda core: core.move_all())

    @property
    def num_open_choices(self) -> int:
        """Choices that run or wait."""
        return self._open.num_choices

    @property
    def has_left(self) -> bool:
        """Whether new requests are rejected since `move_all`."""
        return self._has_left

    def take_requests(self) -> None:
        """Accept new requests again after `move_all`."""
        self._has_left = False

    async def shutdown(self, timeout_s: float = 30.0) -> None:
        """Stop after the running step; open streams end with ERROR."""
        self._watchdog.stop()
        await self.take_over.close()
        await self._thread.shutdown(min(timeout_s, HUNG_JOIN_S) if self._watchdog.is_hung else timeout_s)
        if self._exchange is not None:
            await asyncio.to_thread(self._exchange.close)
        self._grammars.close()

    def _fetch_status(self) -> FetchStatus | None:
        return None if self._exchange is None else replace(self._exchange.status(), **self.take_over.status())

    @property
    def _unavailable(self) -> str | None:
        """Why new requests are rejected although the engine is ready; None if they are accepted."""
        if self._is_draining:
            return "the engine is shutting down"
        return "this node is drained" if self._has_left else self._watchdog.shortage

    def _refusal(self, question: Question) -> Refusal | None:
        """Why the engine cannot take a request; None if it can as far as is known without its work."""
        core = self._thread.worker
        if self._is_draining or self._has_left:
            return "draining"
        if core is None or self._thread.state != "ready" or self._unavailable is not None:
            return "not_ready"
        if question.num_tokens > ESTIMATE_MARGIN * core.runner.max_context_tokens:
            return "context"
        if question.has_images and "image" not in core.runner.capabilities.get("media", ()):
            return "media"
        num_open = self._open.num_choices + core.quoter.num_booked
        is_full = num_open + question.num_choices > self.config.max_running + self.config.max_queue
        return "queue_full" if is_full else None

    def _core_for(self, request: EngineRequest) -> EngineCore:
        """Return the core that will serve the request. Raises what `generate` raises."""
        if (reason := self._thread.unavailable_reason or self._unavailable) is not None:
            raise Unavailable(reason, retry_after.ENGINE_S)
        core = self._thread.worker
        assert core is not None
        check_request(request, self.config, core.runner)
        self._open.check_room(request, lambda: core.scheduler.expected_wait_s() or retry_after.ENGINE_S)
        return core

    async def _warm_up(self) -> None:
        """Prefill the pinned prompts."""
        self._load_progress = 1.0
        self._watchdog.start()
        if self.config.prefix_cache.pinned:
            await self._pinned.render()
            if self._thread.worker is not None:  # the engine may have failed meanwhile
                self._thread.state = "warming"
            await self._pinned.prefill()

    # On the device thread.

    def _make_core(self) -> EngineCore:
        runner, disk = self._make_runner(self.config, self._set_progress), self.config.prefix_cache.disk
        try:
            self._check_caching(runner)
            files = SnapshotFiles(disk, runner.fingerprint) if disk is not None else None
            if files is not None and self._sharing is not None:
                port = self.config.prefix_cache.fetch_port
                self._exchange = SnapshotExchange(files, self._sharing, port, runner.fingerprint, self.take_over.write)
            peers = None if self._exchange is None else self._exchange.client
            return EngineCore(self.config, runner, self._publish, files=files, peers=peers, poll=self._thread.poll)
        except BaseException:
            if self._exchange is not None:
                self._exchange.close()
            runner.close()
            raise

    def _check_caching(self, runner: ModelRunner) -> None:
        """Raise EngineFailed for options of the prefix cache that a model without one could only ignore."""
        cache = self.config.prefix_cache
        asked = [name for name, is_asked in (("disk", cache.disk is not None), ("pinned", cache.pinned)) if is_asked]
        if runner.whole_prompts is not None and asked:
            names = " and ".join(f"prefix_cache.{name}" for name in asked)
            raise EngineFailed(
                f"{names} cannot be used with {self.config.model}: {runner.whole_prompts}, so none is cached; remove it"
            )

    def _set_progress(self, progress: float) -> None:
        if self._load_progress == 1.0 and progress < 1.0:
            self._thread.call_soon(self._begin_compiling)
        self._load_progress = progress

    def _publish(self, chunks: Published) -> None:
        """Deliver all rows' chunks with one wake-up of the event loop per step."""
        self._thread.call_soon(self._deliver, chunks)

    # On the event loop.

    def _deliver(self, chunks: Published) -> None:
        for row_id, chunk in chunks.items():
            if chunk.timeline is not None:
                self.ended.note(row_id, chunk.timeline)
            stream = self._open.streams.get(row_id.rpartition("/")[0])
            if stream is not None:
                stream.put(chunk)

    def _begin_compiling(self) -> None:
        if self._thread.state == "loading":
            self._thread.state = "compiling"

    def _end_streams(self, error: str) -> None:
        self._open.end(error, retry_after.ENGINE_S)
