"""Measure on a GPU: bursts of short prompts, decoding behind long contexts, scoring, and equal tokens in low precision.

    python -m tests.benchmarks.gpu_bench --shape qwen3.5-4b --rounds 5 --only scoring top-k busy
    python -m tests.benchmarks.gpu_bench --only equal sampled

Each arm that has a before and an after takes them in turns, in one process.

burst: seconds until 16 prompts of 64 tokens have their first tokens, and until one has, with random weights of the
shape. context: a decode step of four rows behind --long tokens each, and behind 512. scoring: a draft of --draft shape
reads 8192 tokens, and looks ahead: waited for step by step, launched ahead, and with compiled blocks. top-k: the best
20 of 248,320 scores by a partition and by maxima of blocks. busy: tokens/s of a prompt of --busy tokens, alone and
while eight rows decode. equal, sampled: the demo model in the device's own precision, greedy and at temperature 0.8,
the share of --tokens that are the same up to the first difference, alone and in a batch of eight, with and without
drafts.
"""

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.row import Row
from engine.core.runner import Drafts
from engine.core.scheduler_output import Published
from engine.protocol import EngineRequest, SamplingParams
from engine.worker.kv_cache import SequenceCache
from engine.worker.model_runner import MLXRunner, load_runner
from engine.worker.ranking import best_first
from engine.worker.spec_prefill.draft import Draft
from tests.benchmarks.measure import Spread, heading
from tests.benchmarks.step_bench import SHAPES, random_model

NUM_PROMPTS, PROMPT_TOKENS = 16, 64
NUM_ROWS, SHORT_TOKENS, NUM_STEPS = 4, 512, 16
SCORED_TOKENS, SCORED_CHUNK, LOOK_AHEAD = 8192, 2048, 16
TOP_K, TOP_K_VOCABULARY, TOP_K_REPEATS = 20, 248_320, 8
BUSY_ROWS = 8
SAMPLED_TEMPERATURE = 0.8
ARMS = ("scoring", "top-k", "burst", "context", "busy", "equal", "sampled")
EQUAL_ROWS, EQUAL_PROMPT, EQUAL_TOKENS = 8, 48, 160
VOCABULARY = range(300, 1200)  # ordinary words of the demo model's tokenizer


def config(**fields: object) -> EngineConfig:
    return EngineConfig.model_validate({"prefix_cache": {"enabled": False}, "max_running": 32, **fields})


@contextmanager
def random_runner(shape: str, settings: EngineConfig) -> Iterator[MLXRunner]:
    runner = MLXRunner(random_model(SHAPES[shape]), settings)
    runner.warm_up()
    try:
        yield runner
    finally:
        runner.close()
        gc.collect()
        mx.clear_cache()


def request(
    name: str, token_ids: np.ndarray, max_tokens: int, temperature: float = 0.0, seed: int = 0
) -> EngineRequest:
    return EngineRequest(name, token_ids, SamplingParams(max_tokens, temperature=temperature, seed=seed), ())


def prompts(rng: np.random.Generator, count: int, num_tokens: int) -> list[np.ndarray]:
    return [rng.choice(VOCABULARY, num_tokens).astype(np.int32) for _ in range(count)]


def run_all(core: EngineCore, requests: Sequence[EngineRequest], outputs: dict[str, list[int]]) -> float:
    """Run the requests to their end; returns the seconds until all had their first token."""
    began_s, first_s = time.perf_counter(), 0.0
    for one in requests:
        core.add_request(one)
    while core.has_work:
        core.step()
        if not first_s and all(outputs.get(f"{one.request_id}/0") for one in requests):
            first_s = time.perf_counter() - began_s
    return first_s or time.perf_counter() - began_s


def make_core(runner: MLXRunner, settings: EngineConfig) -> tuple[EngineCore, dict[str, list[int]]]:
    outputs: dict[str, list[int]] = {}

    def publish(chunks: Published) -> None:
        for row_id, chunk in chunks.items():
            assert chunk.error is None, chunk.error
            outputs.setdefault(row_id, []).extend(chunk.token_ids)

    return EngineCore(settings, runner, publish), outputs


def burst(shape: str, rounds: int) -> None:
    """Without the compiled step, which takes no bursts."""
    settings = config(compile="off", mtp="off")
    with random_runner(shape, settings) as runner:
        core, outputs = make_core(runner, settings)
        rng, taken = np.random.default_rng(0), {1: list[float](), NUM_PROMPTS: list[float]()}
        for i in range(rounds + 2):  # the first ones compile kernels, and teach the cost model
            for count, seconds in taken.items():
                names = [f"{i}-{count}-{j}" for j in range(count)]
                asked = [
                    request(name, ids, 2) for name, ids in zip(names, prompts(rng, count, PROMPT_TOKENS), strict=True)
                ]
                first_s = run_all(core, asked, outputs)
                if i >= 2:
                    seconds.append(first_s * 1e3)
        one, many = (Spread.of(seconds) for seconds in taken.values())
        num_bursts = core.stats.num_bursts
        print(f"burst: 1 prompt {one:.1f} ms, {NUM_PROMPTS} prompts {many:.1f} ms ({many.median / one.median:.2f} x)")
        print(f"  forwards of several prompts: {num_bursts}")


def context(shape: str, long_tokens: int, rounds: int) -> None:
    settings = config()
    with random_runner(shape, settings) as runner:
        rng, steps = np.random.default_rng(0), {SHORT_TOKENS: list[float](), long_tokens: list[float]()}
        for num_tokens, taken in steps.items():
            rows = [Row(request(f"{num_tokens}-{i}", ids, 2**16)) for i, ids in enumerate(
                prompts(rng, NUM_ROWS, num_tokens))]  # fmt: skip
            began_s = time.perf_counter()
            for row in rows:
                done = 0
                while done < num_tokens:
                    done += runner.prefill([row], 2048).num_tokens
            prefill_s = time.perf_counter() - began_s
            for _ in range(rounds):
                taken.append(step_ms(runner, 0))
            drafted = [step_ms(runner, 3) for _ in range(rounds)]
            print(
                f"context: {NUM_ROWS} rows of {num_tokens} tokens: step {Spread.of(taken):.2f} ms, with three drafts "
                f"{Spread.of(drafted):.2f} ms, prefill {NUM_ROWS * num_tokens / prefill_s:.0f} tokens/s"
            )
            runner.drop([row.id for row in rows])
        short, long = (statistics.median(taken) for taken in steps.values())
        print(f"  long / short {long / short:.2f} x")


def busy(shape: str, num_tokens: int, rounds: int) -> None:
    """Prefill of a long prompt alone and while eight rows decode, with one wait per chunk and with one behind each of
    its parts, in turns."""
    settings = config(mtp={"max_draft_tokens": 1, "max_rows": 1})  # the head is primed, and nothing is drafted
    with random_runner(shape, settings) as runner:
        core, outputs = make_core(runner, settings)
        rng = np.random.default_rng(0)
        for num_rows in (0, BUSY_ROWS):
            for i, ids in enumerate(prompts(rng, num_rows, PROMPT_TOKENS)):
                core.add_request(request(f"row {i}", ids, 2**16))
            while sum(map(bool, outputs.values())) < num_rows:
                core.step()
            taken = {name: list[float]() for name in ("a wait per part", "a wait per chunk")}
            step_times = {name: list[float]() for name in taken}
            for i in range(rounds + 1):
                for name in taken:
                    with waits(runner) if name == "a wait per part" else contextlib.nullcontext():
                        prompt = request(f"{num_rows} {name} {i}", prompts(rng, 1, num_tokens)[0], 1)
                        steps_before, seconds = core.stats.num_steps, until_first(core, prompt, outputs)
                    if i:
                        taken[name].append(num_tokens / seconds)
                        step_times[name].append(seconds / (core.stats.num_steps - steps_before) * 1e3)
            for name in taken:
                print(f"busy: {num_tokens} tokens beside {num_rows} rows, {name}: {Spread.of(taken[name]):.0f} tokens/s"
                      f", {Spread.of(step_times[name]):.1f} ms per step")  # fmt: skip


@contextmanager
def waits(runner: MLXRunner) -> Iterator[None]:
    """Let the device be waited for behind the target's part of a chunk, and behind the MTP head's."""

    def waiting(launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = launch(*args)
            mx.synchronize()
            return result

        return run

    view, heads = runner._language_model, runner._heads
    assert heads is not None
    with patch.object(view, "extend", waiting(view.extend)), patch.object(heads, "prime", waiting(heads.prime)):
        yield


def until_first(core: EngineCore, one: EngineRequest, outputs: dict[str, list[int]]) -> float:
    """Seconds until the request has its first token."""
    began_s = time.perf_counter()
    core.add_request(one)
    while not outputs.get(f"{one.request_id}/0"):
        core.step()
    return time.perf_counter() - began_s


def step_ms(runner: MLXRunner, num_drafts: int) -> float:
    runner.decode(Drafts(num_drafts))
    began_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        runner.decode(Drafts(num_drafts))
    return (time.perf_counter() - began_s) / NUM_STEPS * 1e3


def scoring(draft_shape: str, rounds: int) -> None:
    """Steps ahead in three ways, in turns: waited for one by one and scored each on its own, launched without waiting
    and scored together, and the same with compiled blocks."""
    draft = Draft(random_model(SHAPES[draft_shape]))
    ids = prompts(np.random.default_rng(0), 1, SCORED_TOKENS)[0]
    read = list[float]()
    looked = {name: list[float]() for name in ("waited for", "launched ahead", "launched ahead, compiled")}
    blocks = {}
    for compiles in (False, True):
        draft.compile_blocks(compiles)
        blocks[compiles] = draft._blocks
    for i in range(rounds + 1):  # the first one traces and compiles
        for name, taken in looked.items():
            draft._blocks = blocks["compiled" in name]
            cache, began_s = draft.make_cache(), time.perf_counter()
            for start in range(0, SCORED_TOKENS - 1, SCORED_CHUNK):
                end = min(start + SCORED_CHUNK, SCORED_TOKENS - 1)
                draft.extend(ids[start:end], start, cache, SCORED_TOKENS + LOOK_AHEAD)
            read_s, began_s = time.perf_counter() - began_s, time.perf_counter()
            look = look_waiting if name == "waited for" else look_ahead
            look(draft, ids[-1:], cache)
            if i:
                read.append(read_s * 1e3)
                taken.append((time.perf_counter() - began_s) * 1e3)
    print(f"scoring {SCORED_TOKENS} tokens: read {Spread.of(read):.1f} ms; {LOOK_AHEAD} steps ahead:")
    for name, taken in looked.items():
        print(f"  {name}: {Spread.of(taken):.1f} ms")
    del draft
    gc.collect()
    mx.clear_cache()


def look_waiting(draft: Draft, last_id: np.ndarray, cache: SequenceCache) -> None:
    token, total = mx.array(last_id[None]), mx.zeros(SCORED_TOKENS)
    for i in range(LOOK_AHEAD):
        token, states = draft.look_ahead(token, cache)
        total = total + draft.observe([states], SCORED_TOKENS - 1 + i, cache, SCORED_TOKENS)
        mx.eval(token, total, [layer.state for layer in cache])
        token.item()


def look_ahead(draft: Draft, last_id: np.ndarray, cache: SequenceCache) -> None:
    """As the scorer does it: the token of a step is read while the next one runs."""
    token, steps = mx.array(last_id[None]), list[list[mx.array]]()
    for _ in range(LOOK_AHEAD):
        before = token
        token, states = draft.look_ahead(before, cache)
        before.item()
        steps.append(states)
    mx.eval(draft.observe(steps, SCORED_TOKENS - 1, cache, SCORED_TOKENS))


def top_k(rounds: int) -> None:
    """The best 20 of 248,320 scores by a partition, as MLX has it, and by maxima of blocks first, in turns."""
    ways = {"partition": partition, "blocks": best_first}
    for num_positions in (1, 4, 16, 64):
        scores = mx.random.normal((num_positions, 1, TOP_K_VOCABULARY), key=mx.random.key(num_positions))
        taken = {name: list[float]() for name in ways}
        for i in range(rounds + 1):
            for name, way in ways.items():
                mx.eval(scores)
                began_s = time.perf_counter()
                mx.eval([way(scores + j, TOP_K) for j in range(TOP_K_REPEATS)])
                if i:
                    taken[name].append((time.perf_counter() - began_s) / TOP_K_REPEATS * 1e3)
        print(f"top-k: {num_positions} positions: " + ", ".join(
            f"{name} {Spread.of(each):.3f} ms" for name, each in taken.items()))  # fmt: skip


def partition(scores: mx.array, count: int) -> mx.array:
    some = mx.argpartition(-scores, kth=count - 1, axis=-1)[..., :count]
    order = mx.argsort(-mx.take_along_axis(scores, some, axis=-1), axis=-1)
    return mx.take_along_axis(some, order, axis=-1)


def answers(name: str, settings: EngineConfig, asked: Sequence[EngineRequest]) -> dict[str, dict[str, list[int]]]:
    """Return the tokens of the requests alone, and in batches."""
    runner, found = load_runner(settings, lambda part: None), {}
    for rows in (1, EQUAL_ROWS):
        core, outputs = make_core(runner, settings)
        for start in range(0, len(asked), rows):
            run_all(core, asked[start : start + rows], outputs)
        found[f"{name}, {rows}"] = outputs
    runner.close()
    return found


def equal(temperature: float, num_tokens: int) -> None:
    """Share of tokens up to which two runs of a request agree, of all that it gets."""
    rng = np.random.default_rng(0)
    arms = {"plain": config(model="demo", mtp="off"), "drafts": config(model="demo", mtp={"max_draft_tokens": 3})}
    num_requests = -(-num_tokens // EQUAL_TOKENS)
    asked = [
        request(f"r{i}", ids, EQUAL_TOKENS, temperature, seed=i)
        for i, ids in enumerate(prompts(rng, num_requests, EQUAL_PROMPT))
    ]
    found: dict[str, dict[str, list[int]]] = {}
    for name, settings in arms.items():
        in_thread(lambda name=name, settings=settings: found.update(answers(name, settings, asked)))
    base = found["plain, 1"]
    for name, outputs in found.items():
        same = total = agreeing = 0
        for row_id, ids in base.items():
            other = outputs[row_id]
            ends = next((i for i, (a, b) in enumerate(zip(ids, other, strict=True)) if a != b), len(ids))
            agreeing, total, same = agreeing + ends, total + len(ids), same + (ends == len(ids))
        print(
            f"equal, temperature {temperature:g}: {name} row(s) against plain, 1: {agreeing / total:.4f} of {total} "
            f"tokens before the first that differs, {same} of {len(base)} answers whole"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-4b", choices=sorted(SHAPES))
    parser.add_argument("--draft", default="qwen3.5-0.8b", choices=sorted(SHAPES))
    parser.add_argument("--long", type=int, default=60_000, help="tokens of a long context")
    parser.add_argument("--tokens", type=int, default=10_000, help="compared in low precision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=8192, help="tokens of the prompt beside rows that decode")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS, metavar="ARM", help=", ".join(ARMS))
    args = parser.parse_args()
    print(heading(f"gpu_bench {args.shape} on {mx.default_device()}"))
    arms: dict[str, Callable[[], None]] = {
        "scoring": lambda: scoring(args.draft, args.rounds),
        "top-k": lambda: top_k(args.rounds),
        "burst": lambda: burst(args.shape, args.rounds),
        "context": lambda: context(args.shape, args.long, args.rounds),
        "busy": lambda: busy(args.shape, args.busy, args.rounds),
        "equal": lambda: equal(0.0, args.tokens),
        "sampled": lambda: equal(SAMPLED_TEMPERATURE, args.tokens),
    }
    for name, arm in arms.items():
        if name in args.only:
            in_thread(arm)


def in_thread(work: Callable[[], None]) -> None:
    """A runner that is closed leaves its thread without MLX's streams."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


if __name__ == "__main__":
    main()
