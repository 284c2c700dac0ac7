"""A very long conversation from its messages to its answer: seconds of each part, and memory against the budget.

    uv run python -m tests.benchmarks.long_context --tokens 25000 50000 100000 200000

For each length a tiny random Qwen3.5 model (a recurrent layer and one with full attention, of one head) gets a
conversation of about that many tokens, in turns of --turn-tokens. `plan` is the planner's time: message walking, chat
template, tokenizer, boundaries. `first` is the time from the engine's request to its first token, `per token` that of
the --answer tokens after it, and `second` that to the first token of the conversation's next turn, of which `cached`
tokens came from the cache. `peak` is the most memory that MLX had in use beyond the weights, `booked` the most that the
accounts of the memory budget allowed for, and `other` the most that no account explained.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip

from deployments.planners.prompt_planner import PromptPlanner
from deployments.requests import ChatRequest
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.memory.budget import Accounts
from engine.errors import EngineFailed
from engine.processing.message import Message
from tests.benchmarks.measure import heading, table
from tests.support.tiny import Tiny, build

CONTEXT = 262144
CHARS_PER_TOKEN = 1.35  # of the tiny tokenizer's made-up words
POLL_S = 0.05
ACCOUNTS = ("row", "prefill", "transient", "prefix_cache", "image_cache")


@dataclass
class Figures:
    """Seconds of one length's parts, and bytes."""

    num_tokens: int = 0
    plan_s: float = 0.0
    first_s: float = 0.0
    per_token_s: float = 0.0
    second_plan_s: float = 0.0
    second_s: float = 0.0
    num_cached: int = 0
    peak_bytes: int = 0
    books: list[Accounts] = field(default_factory=list)

    @property
    def booked_bytes(self) -> int:
        return max(sum(getattr(one, f"{account}_bytes") for account in ACCOUNTS) for one in self.books)

    @property
    def row(self) -> list[str]:
        seconds = self.plan_s, self.first_s, self.per_token_s, self.second_plan_s, self.second_s
        sizes = self.peak_bytes, self.booked_bytes, max(one.unaccounted_bytes for one in self.books)
        cells = *(f"{s:.3f}" for s in seconds), str(self.num_cached), *(f"{n / 2**20:.0f}" for n in sizes)
        return [str(self.num_tokens), *cells]


def conversation(num_tokens: int, turn_tokens: int) -> list[Message]:
    """User and assistant in turns, of about `num_tokens` tokens in all."""
    rng, messages = random.Random(num_tokens), []
    num_turns = max(1, num_tokens // turn_tokens // 2 * 2 + 1)
    for turn in range(num_turns):
        words, size = [], 0.0
        while size < num_tokens / num_turns * CHARS_PER_TOKEN:
            words.append("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7))))
            size += len(words[-1]) + 1
        messages.append({"role": ("user", "assistant")[turn % 2], "content": " ".join(words)})
    return messages


async def measure(model: Path, num_tokens: int, turn_tokens: int, answer: int) -> Figures:
    """Measure one length in an engine of its own."""
    config = EngineConfig(model=str(model), device="cpu", dtype="float32", step_timeout_s=600, mtp="off")
    planner, core = PromptPlanner(config), AsyncEngine(config)
    await core.wait_ready()
    figures, weights = Figures(), mx.get_active_memory()
    polling = asyncio.create_task(_poll(core, figures.books))
    messages = conversation(num_tokens, turn_tokens)
    mx.reset_peak_memory()
    figures.num_tokens, figures.plan_s, times, _ = await _ask(planner, core, "first", messages, answer)
    figures.first_s = times[0]
    figures.per_token_s = (times[-1] - times[0]) / (len(times) - 1)
    messages = [*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and then?"}]
    _, figures.second_plan_s, times, figures.num_cached = await _ask(planner, core, "second", messages, 2)
    figures.second_s, figures.peak_bytes = times[0], mx.get_peak_memory() - weights
    polling.cancel()
    await core.shutdown()
    return figures


async def _ask(
    planner: PromptPlanner, core: AsyncEngine, name: str, messages: list[Message], max_tokens: int
) -> tuple[int, float, list[float], int]:
    """Return the prompt's tokens, seconds of planning and to each token of the answer, and the cached tokens."""
    began = time.perf_counter()
    request = ChatRequest(name, tuple(messages), max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    planned = await planner.engine_request(request, messages)
    plan_s, began, times, num_cached = time.perf_counter() - began, time.perf_counter(), [], 0
    async for chunk in core.generate(planned):
        if chunk.error is not None:
            raise EngineFailed(chunk.error)
        num_cached = max(num_cached, chunk.num_cached)
        times += [time.perf_counter() - began] * len(chunk.token_ids)
    return len(planned.token_ids), plan_s, times, num_cached


async def _poll(core: AsyncEngine, books: list[Accounts]) -> None:
    while True:
        worker = core._thread.worker
        assert worker is not None
        books.append(worker.budget.accounts)  # those of the status page are read between two chunks
        await asyncio.sleep(POLL_S)


def make_model(out: Path) -> Path:
    """Build the checkpoint."""
    path = build(out, Tiny(layers=2, interval=2, heads=1, kv_heads=1, mtp=False))
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (path / "config.json").write_text(json.dumps(config))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[25_000, 50_000, 100_000, 200_000])
    parser.add_argument("--turn-tokens", type=int, default=1000)
    parser.add_argument("--answer", type=int, default=16)
    args = parser.parse_args()
    print(heading("long_context"))
    with tempfile.TemporaryDirectory() as out:
        model = make_model(Path(out) / "model")
        found = [asyncio.run(measure(model, n, args.turn_tokens, args.answer)) for n in args.tokens]
    columns = [
        "tokens",
        "plan s",
        "first s",
        "per token s",
        "plan 2 s",
        "second s",
        "cached",
        "peak MiB",
        "booked",
        "other",
    ]
    print(table(columns, [figures.row for figures in found]))


if __name__ == "__main__":
    main()
