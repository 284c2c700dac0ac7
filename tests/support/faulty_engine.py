"""A real engine with hooks at its seams, three requests that meet in it, and the state in which it must be afterwards.

The model is random and tiny, in float32: what a request gets does not depend on its company, so that every token can be
compared. Nothing is left to timing: the requests are in the queue before the first of them makes a step.
"""

import asyncio
import gc
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from engine.async_engine import AsyncEngine, RunnerFactory
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.row import Matcher
from engine.core.runner import ModelRunner
from engine.core.scheduler_output import Published
from engine.errors import OrchardError
from engine.grammar_compilers import GrammarCompilers
from engine.protocol import Boundary, EngineRequest, FinishReason, GrammarSpec, ImagePatches, SamplingParams, TokenChunk
from engine.status import EngineStatus
from engine.worker.loader import load
from engine.worker.model_runner import MLXRunner
from tests.support.fake_runner import until
from tests.support.faults import Faults, Faulty, Hanging
from tests.support.tiny import TOKEN_IDS

log = logging.getLogger("orchard.engine")

TINY: dict[str, Any] = {"layers": 2, "interval": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "agree": 0.3}
CHUNK_TOKENS = 16
DRAFTS = {"max_draft_tokens": 2, "max_rows": 8}
RUNNER_SEAMS = (
    *(
        "prefill",
        "prefill_burst",
        "decode",
        "restore",
        "snapshot",
        "snapshot_row",
        "pending",
        "export_snapshot",
        "import_snapshot",
    ),
    *("drop", "reset", "memory", "probe", "free_caches"),
)
LOOKS = 20
DEADLINE_S = 60.0
"""For what takes a fraction of a second on an idle machine."""

ROWS = {"num_finished", "num_aborted", "num_failed", "num_expired", "num_moved"}
"""Counters of which each row that was started counts in exactly one."""


def faulty_runner(runner: Any, faults: Faults) -> ModelRunner:
    """Seams: the runner's methods, `join` and `remove` (of rows, in the batch), `encode` (a piece of an image)."""
    runner._batch = Faulty(runner._batch, faults, {"join": "join", "remove": "remove"})
    runner._prefill._vision = Faulty(runner._prefill._vision, faults, {"advance": "encode"})
    seen: Any = Faulty(runner, faults, {name: name for name in RUNNER_SEAMS})
    return seen


class FaultyGrammars(GrammarCompilers):
    """Seams: `submit` (a request is about to enter the device thread's queue), `masks` and `advance` (of a row's
    grammar)."""

    def __init__(self, config: EngineConfig, faults: Faults):
        super().__init__(config)
        self.faults = faults

    async def matchers(self, request: EngineRequest, vocab_size: int) -> list[Matcher]:
        matchers = await super().matchers(request, vocab_size)
        self.faults.at("submit", "before", [request.request_id])
        seams = {"masks": "masks", "advance": "advance"}
        names = [(request.request_id, f"{request.request_id}/{i}") for i in range(len(matchers))]
        wrapped: list[Any] = [Faulty(one, self.faults, seams, mine) for one, mine in zip(matchers, names, strict=True)]
        return wrapped


class FaultyEngine(AsyncEngine):
    """Further seams: those of FaultyGrammars, and `publish`."""

    def __init__(self, config: EngineConfig, faults: Faults, make_runner: RunnerFactory):
        self.faults = faults
        super().__init__(config, lambda config, progress: faulty_runner(make_runner(config, progress), faults))
        self._grammars = FaultyGrammars(config, faults)

    def _publish(self, chunks: Published) -> None:
        self.faults.around(super()._publish, "publish")(chunks)


class Reader:
    """Somebody who reads an answer: what came, by choice. pauses: after the first chunk, until `resume` is set."""

    def __init__(self, engine: AsyncEngine, request: EngineRequest, pauses: bool = False):
        self.name = request.request_id
        self.has_paused = False
        self.tokens: list[tuple[int, ...]] = [()] * request.num_choices
        self.ends: dict[int, TokenChunk] = {}
        self.num_cached = 0
        self.resume = asyncio.Event()
        self._pauses = pauses
        self._stream: Any = engine.generate(request)
        self.task = asyncio.create_task(self._read())
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # it is looked at if one wants

    async def _read(self) -> None:
        async for chunk in self._stream:
            assert chunk.index not in self.ends, "nothing comes after the end of a choice"
            self.tokens[chunk.index] += chunk.token_ids
            self.num_cached = max(self.num_cached, chunk.num_cached)
            if chunk.finish_reason is not None:
                self.ends[chunk.index] = chunk
            if self._pauses:
                self.has_paused = True
                await self.resume.wait()

    async def cancel(self) -> None:
        """Leaves wherever it waits."""
        self.task.cancel()
        await asyncio.wait({self.task})

    async def close(self) -> None:
        """Leaves while it pauses: nothing of the engine runs on its behalf."""
        await until(lambda: self.has_paused)
        await self._stream.aclose()
        await self.cancel()

    @property
    def reasons(self) -> list[FinishReason | None]:
        return [self.ends[i].finish_reason if i in self.ends else None for i in range(len(self.tokens))]

    @property
    def errors(self) -> list[str | None]:
        return [self.ends[i].error if i in self.ends else None for i in range(len(self.tokens))]

    @property
    def refusal(self) -> OrchardError | None:
        """The error that `generate` has raised; only Orchard's own errors are expected."""
        error = None if self.task.cancelled() else self.task.exception()
        assert error is None or isinstance(error, OrchardError), repr(error)
        return error


def tokens(seed: object, count: int) -> np.ndarray:
    """Text; the same for the same seed."""
    return np.random.default_rng(zlib.crc32(repr(seed).encode())).integers(16, 500, count).astype(np.int32)


NUM_SYSTEM, NUM_PROMPT = 34, 70
NUM_CHUNKS = 7
"""Chunks of 16 tokens, cut at the boundaries: up to 16, 32, 34, 48, 64, 69, 70."""

_STOP = (TOKEN_IDS["<|im_end|>"],)

RUNS = EngineRequest("runs", tokens("runs", 12), SamplingParams(70, 0.0), ())
WAITS = EngineRequest("waits", tokens("waits", 80), SamplingParams(8, 1.0, top_p=0.9, seed=5), ())
PLAIN = EngineRequest(
    "victim",
    np.concatenate([tokens("system", NUM_SYSTEM), tokens("question", NUM_PROMPT - NUM_SYSTEM)]),
    SamplingParams(30, 0.8, seed=3, repetition_penalty=1.1),
    (),
    boundaries=(Boundary("system", NUM_SYSTEM),),
)
THREE = replace(PLAIN, num_choices=3)
REGEX = replace(PLAIN, grammar=GrammarSpec("regex", "[a-z]{200,250}"), stop_token_ids=_STOP)
THREE_REGEX = replace(REGEX, num_choices=3)


def with_picture() -> EngineRequest:
    """A square picture of four image tokens, behind 20 tokens of text."""
    patches = np.random.default_rng(1).integers(0, 256, (16, 3, 8, 8)).astype(np.uint8)
    pad = np.full(4, TOKEN_IDS["<|image_pad|>"], np.int32)
    ids = np.concatenate([tokens("look", 20), pad, tokens("what is it", 20)])
    return replace(PLAIN, token_ids=ids, boundaries=(), images=(ImagePatches(patches, (1, 4, 4), 4, "noise"),))


@dataclass(frozen=True)
class State:
    """Resources in use while nothing is open; equal before and after whatever happens. has_work: rows are still to be
    freed."""

    has_work: bool
    active_bytes: int
    decode_cache_bytes: int
    prefill_cache_bytes: int
    prefix_cache_bytes: int
    integrity_error: str | None


@dataclass
class Scene:
    """Three requests: `runs` decodes, `victim` is behind it, `waits` behind that. Nothing moves until `go`."""

    runs: Reader
    victim: Reader
    waits: Reader
    gate: Hanging

    @property
    def all(self) -> tuple[Reader, Reader, Reader]:
        return self.runs, self.victim, self.waits

    async def go(self) -> None:
        """Everybody has been answered when it returns."""
        self.gate.release()
        tasks = {reader.task for reader in self.all}
        _, pending = await asyncio.wait(tasks, timeout=DEADLINE_S)
        assert not pending, f"{len(pending)} of 3 have no answer after {DEADLINE_S:.0f} s"


class Bench:
    """One engine on a loop of its own, for the tests of a module, and what requests get from it undisturbed."""

    def __init__(self, path: Path, like: "Bench | None" = None, **config: Any):
        """like: one with the same model, whose answers are known and whose weights are in memory."""
        self.faults = Faults()
        self._loop = asyncio.Runner()
        defaults = {"max_running": 5, "vision_cache_mb": 0, "mtp": DRAFTS, "memory": {"min_available_gb": 0}}
        chunks = {"prefill_chunk_tokens": CHUNK_TOKENS, "prefill_chunk_tokens_busy": CHUNK_TOKENS}
        cache = {"prefix_cache": {"answers": False} | config.pop("prefix_cache", {})}
        self.config = EngineConfig.model_validate({"model": str(path), **defaults, **chunks, **cache, **config})
        self._alone: dict[str, list[tuple[int, ...]]] = {} if like is None else dict(like._alone)
        self._num_ended = self._num_aborted = 0
        self._owns_log = like is None
        log.addFilter(without_traceback)
        self.model = like.model if like is not None else None
        self.engine = self._loop.run(self._start())
        if like is None:
            self.run(self._warm)
            gc.collect()
            gc.freeze()  # thousands of modules need not be searched each time
        self.state: State = self.run(self.look)

    def another(self, **config: Any) -> "Bench":
        """With an engine of its own, which may be broken; `with` shuts it down."""
        return Bench(Path(self.config.model), self, **config)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _make_runner(self, config: EngineConfig, progress: Callable[[float], None]) -> MLXRunner:
        self.model = self.model or load(config, progress)
        runner = MLXRunner(self.model, config)
        runner.warm_up()
        return runner

    async def _start(self) -> FaultyEngine:
        engine = FaultyEngine(self.config, self.faults, self._make_runner)
        await engine.wait_ready()
        return engine

    async def _warm(self) -> None:
        """Whatever is made at the first use is there afterwards."""
        for request in (RUNS, WAITS, PLAIN, THREE, REGEX, THREE_REGEX, with_picture()):
            await self.alone(request)
        async with self.scene(THREE_REGEX) as scene:
            await scene.go()

    def run(self, test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """For at most 180 s; afterwards nothing is armed."""

        async def bounded() -> Any:
            async with asyncio.timeout(180):
                return await test()

        try:
            return self._loop.run(bounded())
        finally:
            self.faults.clear()

    def close(self) -> None:
        self._loop.run(self.engine.shutdown())
        self._loop.close()
        if self._owns_log:
            log.removeFilter(without_traceback)
            gc.unfreeze()

    async def read(self, request: EngineRequest) -> Reader:
        """All of an answer."""
        reader = Reader(self.engine, request)
        await asyncio.wait_for(asyncio.shield(reader.task), DEADLINE_S)
        return reader

    async def alone(self, request: EngineRequest) -> list[tuple[int, ...]]:
        """The tokens of each choice that nothing disturbs."""
        name = repr(replace(request, request_id=""))
        if name not in self._alone:
            await self.engine.clear_cache()
            reader = await self.read(request)
            assert set(reader.reasons) <= {FinishReason.LENGTH, FinishReason.STOP}, reader.errors
            self._alone[name] = reader.tokens
        return self._alone[name]

    @asynccontextmanager
    async def scene(
        self,
        victim: EngineRequest,
        before: Sequence[EngineRequest] = (),
        prepare: "Callable[[Bench], Coroutine[Any, Any, None]] | None" = None,
        pauses: bool = False,
    ) -> AsyncIterator[Scene]:
        """before: requests that are answered first, with an empty prefix cache; then `prepare` has its turn. pauses: as
        the victim's reader does."""
        await self.engine.clear_cache()
        for request in before:
            await self.read(request)
        if prepare is not None:
            await prepare(self)
        self.begin()
        readers: list[Reader] = []
        try:
            with Hanging() as gate:
                self.faults.arm("decode", gate)
                readers.append(Reader(self.engine, RUNS))
                await until(gate.began.is_set)
                for request in (victim, WAITS):
                    num_before = self.faults.num_passed["submit"]
                    readers.append(Reader(self.engine, request, pauses and request is victim))
                    await until(lambda num=num_before: self.faults.num_passed["submit"] > num)
                    await until(lambda: not self.engine._open.compiling)  # it is in the device thread's queue
                runs, middle, waits = readers
                yield Scene(runs, middle, waits, gate)
        finally:
            for reader in readers:
                await reader.cancel()

    def begin(self) -> None:
        """From here on rows are counted, see `check`."""
        self._num_ended, self._num_aborted = self.num_ended(), self.engine.status().num_aborted

    async def is_undisturbed(self, reader: Reader, request: EngineRequest) -> bool:
        whole = set(reader.reasons) <= {FinishReason.LENGTH, FinishReason.STOP}
        return whole and reader.tokens == await self.alone(request)

    async def look(self) -> State:
        """Return the resources in use with an empty prefix cache, once the device thread has freed the rest."""
        await until(lambda: self.is_idle(self.engine.status()), DEADLINE_S)
        await self.engine.clear_cache()
        state = await self.engine._thread.call(_state)
        for _ in range(LOOKS):  # what was dropped is given back in the next step
            if state == getattr(self, "state", state) and not state.has_work:
                break
            await asyncio.sleep(0.05)
            state = await self.engine._thread.call(_state)
        return state

    async def check(self, request: EngineRequest, num_started: int, num_aborted: int = 0) -> None:
        """Nothing is left of a scene in which so many rows were started, and so many of them were freed before their
        end; and the engine answers as before."""
        await until(lambda: self.num_ended() - self._num_ended >= num_started, DEADLINE_S)
        before, self.state = self.state, await self.look()
        await until(lambda: not self.engine.status().admission["reserved_bytes"], DEADLINE_S)  # refreshed after a step
        status = self.engine.status()
        assert self.num_ended() - self._num_ended == num_started, f"{num_started} rows were started: {status}"
        assert status.num_aborted - self._num_aborted == num_aborted, f"{num_aborted} rows were given up: {status}"
        assert self.state == before, f"{self.state} is held, {before} was"
        assert status.admission["reserved_bytes"] == status.admission["row_bytes"] == 0, status.admission
        self.engine.check_health()
        assert await self.is_undisturbed(await self.read(request), request), "it answers as before"
        await self.engine.clear_cache()

    @staticmethod
    def is_idle(status: EngineStatus) -> bool:
        return status.num_running == status.num_waiting == 0

    def num_ended(self) -> int:
        """Rows, one way or another."""
        counters = asdict(self.engine.status())
        return sum(counters[name] for name in ROWS)


def without_traceback(record: logging.LogRecord) -> bool:
    """Logs of tests are kept, and with an error all arrays that the frames of its traceback know."""
    record.msg, record.args = record.getMessage(), ()
    if record.exc_info:
        record.exc_text, record.exc_info = logging.Formatter().formatException(record.exc_info), None
    return True


def _state(core: EngineCore) -> State:
    gc.collect()
    mx.synchronize()
    memory, cache = core.runner.memory(), core.prefixes.store
    return State(
        core.has_work,
        mx.get_active_memory(),
        memory["decode_cache_bytes"],
        memory["prefill_cache_bytes"],
        cache.num_bytes,
        cache.integrity_error(),
    )
