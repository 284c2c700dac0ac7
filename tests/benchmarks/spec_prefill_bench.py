"""Time to first token with and without SpecPrefill, from the prompt's arrival: scoring, then what is left of prefill.

    uv run python -m tests.benchmarks.spec_prefill_bench --rounds 3
    python -m tests.benchmarks.spec_prefill_bench --target qwen3.5-4b --draft qwen3.5-0.8b --tokens 8192 32768 65536

Target and draft are the demo model's, or random models of a shape: a target of `medium` shape costs ten times what the
demo draft does. Both run behind their own doors (AsyncEngine, AsyncDraftScorer), in one process, one after the other.
Each round makes a new prompt for each length and sends it once in each arm, in an order of its own: `dense`, and sparse
by each --keep. Prompts have no system part and are new to every cache.
"""

import argparse
import asyncio
import random
import time
from collections import defaultdict
from dataclasses import dataclass, replace

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.spec_prefill.plan import ScoreRequest, find_anchors
from engine.draft_scorer import AsyncDraftScorer
from engine.errors import EngineFailed
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.spec_prefill_config import SpecPrefillConfig
from engine.worker.model_runner import MLXRunner, load_runner
from engine.worker.spec_prefill.draft import Draft
from engine.worker.spec_prefill.scorer import PublishScore, Scorer, load_scorer
from tests.benchmarks.measure import Spread, heading
from tests.benchmarks.step_bench import SHAPES, random_model

VOCABULARY = range(300, 1200)  # ordinary words of the demo model's tokenizer


@dataclass(frozen=True)
class Taken:
    """Milliseconds; kept: tokens of the prompt that the target computed."""

    ttft: float
    scoring: float
    kept: int


def start_engine(target: str) -> AsyncEngine:
    config = EngineConfig.model_validate({"prefix_cache": {"enabled": False}, "mtp": "off"})
    if target == "demo":
        return AsyncEngine(config, load_runner)
    return AsyncEngine(config, lambda config, progress: MLXRunner(random_model(SHAPES[target]), config))


def start_scorer(draft: str, max_tokens: int) -> AsyncDraftScorer:
    config = SpecPrefillConfig(enabled=True, max_tokens_scored=max_tokens, memory_share=0.5)
    if draft == "demo":
        return AsyncDraftScorer(config, EngineConfig(), make_scorer=load_scorer)

    def make(config: SpecPrefillConfig, _: EngineConfig, publish: PublishScore) -> Scorer:
        return Scorer(Draft(random_model(SHAPES[draft])), config, publish)

    return AsyncDraftScorer(config, EngineConfig(), make_scorer=make)


def prompt(rng: random.Random, num_tokens: int) -> EngineRequest:
    ids = np.array([rng.choice(VOCABULARY) for _ in range(num_tokens)], np.int32)
    boundaries = (Boundary("turn", num_tokens - 4),)
    return EngineRequest("prompt", ids, SamplingParams(1, temperature=0.0), (), boundaries=boundaries)


async def take_in(
    engine: AsyncEngine, scorer: AsyncDraftScorer, request: EngineRequest, keep: float | None, tenant: str
) -> Taken:
    """keep: None for dense. tenant: one for each arm, so that none finds what the draft has read for another."""
    began, scoring_s = time.perf_counter(), 0.0
    if keep is not None:
        anchors = find_anchors(request.token_ids, (), request.boundaries, np.empty(0, np.int32))
        scored = await scorer.score(ScoreRequest("prompt", request.token_ids, 0, anchors, keep, tenant=tenant))
        request, scoring_s = replace(request, sparse=scored.plan), scored.seconds
    first_s, num_skipped = 0.0, 0
    async for chunk in engine.generate(request):
        if chunk.error is not None:
            raise EngineFailed(chunk.error)
        first_s, num_skipped = first_s or time.perf_counter() - began, chunk.num_skipped
    return Taken(first_s * 1e3, scoring_s * 1e3, len(request.token_ids) - num_skipped)


async def measure(args: argparse.Namespace) -> None:
    rng, taken = random.Random(0), defaultdict[tuple[int, float | None], list[Taken]](list)
    engine, scorer = start_engine(args.target), start_scorer(args.draft, max(args.tokens))
    await engine.wait_ready()
    await scorer.wait_ready()
    arms: list[float | None] = [None, *args.keep]
    for round_number in range(args.rounds + args.warm_up):
        for length in args.tokens:
            request = prompt(rng, length)
            for arm in rng.sample(arms, len(arms)):
                one = await take_in(engine, scorer, request, arm, f"{round_number} {arm}")
                if round_number >= args.warm_up:
                    taken[length, arm].append(one)
    await scorer.shutdown()
    await engine.shutdown()
    for length in args.tokens:
        report(length, [(arm, taken[length, arm]) for arm in arms])


def report(length: int, arms: list[tuple[float | None, list[Taken]]]) -> None:
    dense = [one.ttft for one in arms[0][1]]
    print(f"{length} tokens: dense {Spread.of(dense):.0f} ms")
    for keep, taken in arms[1:]:
        ratio = Spread.of([was / one.ttft for was, one in zip(dense, taken, strict=True)])
        cost = Spread.of([one.scoring / was for was, one in zip(dense, taken, strict=True)])
        print(
            f"  keep {keep}: {Spread.of([one.ttft for one in taken]):.0f} ms, {ratio:.2f} x sooner; "
            f"scoring {Spread.of([one.scoring for one in taken]):.0f} ms, {cost:.2f} of dense; "
            f"{taken[0].kept} tokens computed"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--keep", type=float, nargs="+", default=[0.2, 0.3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--target", choices=["demo", *SHAPES], default="demo")
    parser.add_argument("--draft", choices=["demo", *SHAPES], default="demo")
    args = parser.parse_args()
    print(heading("spec_prefill_bench"), f"target {args.target}, draft {args.draft}, {mx.default_device()}", sep="\n")
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
