"""Warm-up: compiles kernels with a few rows and chunks, and times decode steps and chunks."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from engine.core.row import Row
from engine.core.runner import PLAIN, ChunkTime, Drafts, PromptChunk, StepTime
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.drafting import most_draft_tokens
from engine.worker.snapshot import StateSnapshot

if TYPE_CHECKING:
    from engine.worker.model_runner import MLXRunner

NUM_TOKENS = 16
"""Tokens of a row's prompt."""
NUM_ROWS = (1, 2, 8)
"""Batch sizes whose steps are timed; sizes over 2 only if they are at most `max_running` and fit into MEMORY_SHARE."""
MEMORY_SHARE = 0.25
"""Share of the free memory that the rows may use."""
TIMED_STEPS, MAX_TIMED_S = 2, 0.15
"""Steps that are timed per number of rows and way to draft, and the total seconds after which no further one is."""
TIMED_CHUNK_TOKENS, LONG_CHUNK_S = (64, 256), 0.25
"""Tokens of the chunks that are timed, each after an untimed one; none after a chunk of LONG_CHUNK_S."""
TIMED_SNAPSHOTS = 4
"""Snapshots of one prompt that are timed; the fastest counts."""
BURST_TOKENS = (7, 4)
"""Tokens of the prompts that are computed in one forward, and then as many of each in another one."""


SAMPLED = SamplingParams(2**20, top_p=0.9, min_p=0.01, top_k=20, presence_penalty=1, repetition_penalty=1.1)


def time_steps(
    runner: "MLXRunner", max_running: int, progress: Callable[[float], None] = lambda share: None
) -> tuple[list[StepTime], StateSnapshot | None]:
    """Time decode steps of NUM_ROWS rows with each way to draft.

    Args:
        runner: A runner without rows; it has none afterwards.
        max_running: The most rows that decode at a time.
        progress: Receives the share of the steps that are timed, after each number of rows and way to draft.

    Returns:
        The times, and a snapshot of a row's prompt, None if its state contains NaN or inf.
    """
    prompt, rows, snapshot = np.zeros(NUM_TOKENS, np.int32), [], None
    times: list[StepTime] = []
    for num_rows in NUM_ROWS:
        if num_rows > 2 and not (num_rows <= max_running and _has_room_for(runner, num_rows, snapshot)):
            break
        while len(rows) < num_rows:
            row = Row(EngineRequest(f"warm-up-{len(rows)}", prompt, SamplingParams(2**20), ()))
            runner.prefill([row], len(prompt) // 2)
            snapshot = runner.snapshot([row])
            runner.prefill([row], len(prompt))
            rows.append(row)
        for drafts in (PLAIN, *runner.drafts):
            times.append(StepTime(num_rows, drafts, _step_s(runner, drafts)))
            progress(len(times) / (len(NUM_ROWS) * (1 + len(runner.drafts))))
    runner.drop([row.id for row in rows])
    return times, snapshot


def run_like_an_answer(runner: "MLXRunner", snapshot: StateSnapshot | None) -> None:
    """Compile what the first answers use beside steps and chunks: a cached prefix, sampling, a snapshot at the end.

    Args:
        runner: A runner without rows; it has none afterwards.
        snapshot: A snapshot of the prompts of `time_steps`; None if their state contains NaN or inf.
    """
    row = Row(EngineRequest("warm-up-answer", np.zeros(NUM_TOKENS, np.int32), SAMPLED, ()))
    if snapshot is not None:
        runner.restore([row], snapshot)
    runner.prefill([row], NUM_TOKENS)
    for _ in range(2):
        runner.decode()
    if snapshot is not None:
        runner.snapshot_row(row.id)
    runner.drop([row.id])


def run_burst(runner: "MLXRunner") -> None:
    """Compile what the first prompts that arrive together use: two forwards of prompts of unlike lengths."""
    if runner.no_bursts is not None or 2 * max(BURST_TOKENS) >= runner.max_context_tokens:
        return
    rows = [
        Row(EngineRequest(f"warm-up-burst-{n}", np.zeros(2 * n, np.int32), SamplingParams(1), ())) for n in BURST_TOKENS
    ]
    for _ in range(2):
        runner.prefill_burst([PromptChunk(row, n) for row, n in zip(rows, BURST_TOKENS, strict=True)])
    runner.drop([row.id for row in rows])


def snapshot_s(runner: "MLXRunner") -> float:
    """Return the seconds of taking a snapshot and restoring it: the same copies twice, whatever their size.

    On a GPU they are the launches of some hundred small copies.
    """
    row = Row(EngineRequest("warm-up-snapshot", np.zeros(NUM_TOKENS, np.int32), SamplingParams(1), ()))
    runner.prefill([row], NUM_TOKENS // 2)
    seconds: list[float] = []
    for _ in range(TIMED_SNAPSHOTS):
        began_s = time.perf_counter()
        runner.snapshot([row])
        seconds.append(time.perf_counter() - began_s)
    runner.drop([row.id])
    return 2 * min(seconds)


def time_chunks(runner: "MLXRunner") -> list[ChunkTime]:
    """Time first chunks of TIMED_CHUNK_TOKENS tokens."""
    times: list[ChunkTime] = []
    for num_tokens in TIMED_CHUNK_TOKENS:
        if num_tokens >= runner.max_context_tokens or (times and times[-1].seconds > LONG_CHUNK_S):
            break
        _chunk_s(runner, num_tokens)
        times.append(ChunkTime(num_tokens, _chunk_s(runner, num_tokens)))
    return times


def _chunk_s(runner: "MLXRunner", num_tokens: int) -> float:
    """Return the seconds of the first chunk of a prompt that is one token longer."""
    row = Row(EngineRequest("warm-up-chunk", np.zeros(num_tokens + 1, np.int32), SamplingParams(1), ()))
    began_s = time.perf_counter()
    runner.prefill([row], num_tokens)
    seconds = time.perf_counter() - began_s
    runner.drop([row.id])
    return seconds


def _step_s(runner: "MLXRunner", drafts: Drafts) -> float:
    """Return the seconds of the fastest of a few steps, after two untimed ones that compile kernels."""
    seconds: list[float] = []
    while len(seconds) < 2 + TIMED_STEPS and sum(seconds[2:]) < MAX_TIMED_S:
        began_s = time.perf_counter()
        runner.decode(replace(drafts, is_forced=True))
        seconds.append(time.perf_counter() - began_s)
    return min(seconds[2:])


def _has_room_for(runner: "MLXRunner", num_rows: int, snapshot: StateSnapshot | None) -> bool:
    """Return whether `num_rows` short rows take little of the free memory; verification keeps a state per position."""
    if snapshot is None:
        return False
    num_bytes = num_rows * (most_draft_tokens(runner.drafts) + 2) * (snapshot.state_bytes + snapshot.segment_bytes)
    return num_bytes < MEMORY_SHARE * (runner.memory_limit_bytes - runner.active_bytes)
