"""How often answers stay right when only a part of the prompt is computed: facts to be found in long texts.

    uv run python -m tests.benchmarks.spec_prefill_quality --tokens 1024 2048 4096 8192 --samples 24

Held-out prompts of the demo model's world, the text in the user's message. An answer is right when it holds the value
that was asked for. Each prompt is answered densely and, for each --keep, by plans of the same size from three kinds of
importance: `spec` by the draft model, `random`, and `ends` (the nearer to the first or last token, the better).
All plans have the anchors of every plan (control tokens, the tail of the last turn, first and last chunk).
"""

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.spec_prefill.plan import ScoreRequest, find_anchors, make_plan
from engine.draft_scorer import AsyncDraftScorer
from engine.errors import EngineFailed
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams, SparsePlan
from engine.spec_prefill_config import SpecPrefillConfig
from tests.benchmarks.measure import heading, table
from tests.demo_model.tasks.retrieval import retrieval
from tests.demo_model.world.draws import Draws

ANSWER_TOKENS = 32
ARMS = ("spec", "random", "ends")


@dataclass(frozen=True)
class Question:
    request: EngineRequest
    score: ScoreRequest
    expect: str


def questions(tokenizer: ChatTokenizer, num_tokens: int, count: int) -> Iterator[Question]:
    """The generator's texts are a tenth too short. Texts in the system part are left out: it is always dense."""
    draws = Draws(f"held out, sparse, {num_tokens}")
    while count:
        sample = retrieval(draws, 0.9 * num_tokens, num_questions=1, single=True)
        *messages, answer = sample.messages
        if answer["role"] != "assistant" or len(messages) != 1:
            continue
        chat = tokenizer.chat_prompt(messages, template_kwargs={"enable_thinking": False})
        sampling = SamplingParams(ANSWER_TOKENS, temperature=0.0)
        request = EngineRequest(
            "q", chat.token_ids, sampling, tuple(tokenizer.stop_token_ids), boundaries=chat.boundaries
        )
        nothing = np.empty(0, np.int32)
        anchors = find_anchors(chat.token_ids, tuple(tokenizer.control_token_ids), chat.boundaries, nothing)
        count -= 1
        yield Question(request, ScoreRequest("q", chat.token_ids, 0, anchors, 1.0), sample.value)


def other_plan(score: ScoreRequest, arm: str) -> SparsePlan:
    num_tokens = len(score.token_ids)
    if arm == "random":
        seed = int.from_bytes(score.token_ids[-64:].tobytes()[:8], "little") ^ num_tokens
        return make_plan(score, np.random.default_rng(seed).random(num_tokens).astype(np.float32))
    from_middle = np.abs(np.arange(num_tokens) - num_tokens / 2)
    return make_plan(score, from_middle.astype(np.float32))


async def is_right(engine: AsyncEngine, tokenizer: ChatTokenizer, question: Question, plan: SparsePlan | None) -> bool:
    ids: list[int] = []
    async for chunk in engine.generate(replace(question.request, sparse=plan)):
        if chunk.error is not None:
            raise EngineFailed(chunk.error)
        ids += chunk.token_ids
    detokenizer = tokenizer.detokenizer(())
    return question.expect in detokenizer.push(tuple(ids)) + detokenizer.finish()


async def measure(args: argparse.Namespace) -> None:
    tokenizer = ChatTokenizer(resolve_checkpoint("demo", None, weights=False))
    engine = AsyncEngine(EngineConfig.model_validate({"prefix_cache": {"enabled": False}}))
    scorer = AsyncDraftScorer(SpecPrefillConfig(lookahead=args.lookahead), EngineConfig())
    await engine.wait_ready()
    await scorer.wait_ready()
    rows = []
    for num_tokens in args.tokens:
        right: dict[str, int] = defaultdict(int)
        kept: dict[float, float] = defaultdict(float)
        for question in questions(tokenizer, num_tokens, args.samples):
            right["dense"] += await is_right(engine, tokenizer, question, None)
            for keep in args.keep:
                score = replace(question.score, keep=keep)
                spec = (await scorer.score(score)).plan
                kept[keep] += len(spec.positions) / len(score.token_ids) / args.samples
                for arm in ARMS:
                    plan = spec if arm == "spec" else other_plan(score, arm)
                    right[f"{arm} {keep}"] += await is_right(engine, tokenizer, question, plan)
        names = ["dense", *(f"{arm} {keep}" for keep in args.keep for arm in ARMS)]
        shares = ", ".join(f"{kept[keep]:.2f}" for keep in args.keep)
        rows.append([str(num_tokens), *(f"{right[name]}/{args.samples}" for name in names), shares])
        print(rows[-1], flush=True)
    columns = ["tokens", "dense", *(f"{arm} {keep}" for keep in args.keep for arm in ARMS), "computed"]
    print(table(columns, rows))
    await scorer.shutdown()
    await engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--keep", type=float, nargs="+", default=[0.3, 0.1])
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--lookahead", type=int, default=SpecPrefillConfig().lookahead)
    args = parser.parse_args()
    print(heading("spec_prefill_quality"))
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
