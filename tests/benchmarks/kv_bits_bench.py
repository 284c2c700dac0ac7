"""Keys and values of 16, 8 and 4 bits: right answers, equal tokens, bytes per token, steps per second, longest rows.

    uv run python -m tests.benchmarks.kv_bits_bench --samples 40

Held-out tasks of the demo model, greedy, eight at a time. An answer is right when it is the generator's, that to a
needle when it holds the value. `same` is the share of the tokens of the 16-bit answers that come before the first
difference. `sentences` goes on with unrelated sentences, where there is always something to choose: no answer is right.
Steps are plain ones behind --prompt-tokens tokens. The last table is by the memory costs of a 4B model in bfloat16, of
which no weight is made: one row with nothing beside it, without the intermediate results of a chunk.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_vlm.speculative.drafters import qwen3_5_mtp
from mlx_vlm.utils import get_model_and_args

from engine.config import EngineConfig, KVBits
from engine.core.memory.costs import MemoryCosts
from engine.core.memory.needs import MemoryNeeds
from engine.core.row import Row
from engine.processing.checkpoint import resolve_checkpoint
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import loader
from engine.worker.drafting_head import DraftingHead
from engine.worker.heads.qwen import QwenHead
from engine.worker.kv_layer import SLOTS_STEP
from engine.worker.language_model import LanguageModel
from engine.worker.layer_kinds import kind_of
from engine.worker.model_report import RowBytes
from engine.worker.model_runner import MLXRunner, load_runner
from engine.worker.quantized_kv import UNQUANTIZED_BITS
from tests.benchmarks.measure import Spread, heading, table
from tests.benchmarks.step_bench import SHAPES, text_config
from tests.demo_model.tasks.sample import END_OF_TURN, Sample, prompt_and_answer
from tests.demo_model.world.draws import Draws
from tests.support.driver import Driver
from tests.support.tasks import TASKS

NAMES = {"needles": "needles", "tools": "tools", "json": "json", "sentences": "sampled"}
"""The tasks here, and their names in TASKS."""
MAX_TOKENS = 96
BATCH_SIZES = (1, 8)
LIMIT_GIB = 8


@dataclass(frozen=True)
class Question:
    """One prompt of a task, with the text that makes its answer right; None if there is none."""

    request: EngineRequest
    expected: str | None
    is_part: bool  # Whether the answer need only hold the text.


def questions(name: str, count: int, tokenizer: ChatTokenizer) -> Iterator[Question]:
    draws, task = Draws(f"held out, bits, {name}"), TASKS[NAMES[name]]
    sampling = SamplingParams(MAX_TOKENS, temperature=0.0)
    for i in range(count):
        sample: Any = task.generate(draws)
        if isinstance(sample, str):
            request = EngineRequest(f"{name} {i}", tokenizer.encode_text(sample), sampling, ())
            yield Question(request, None, False)
            continue
        request = EngineRequest(f"{name} {i}", _encode(sample, tokenizer), sampling, tuple(tokenizer.stop_token_ids))
        answer = prompt_and_answer(sample)[1].removesuffix(END_OF_TURN)
        yield Question(request, sample.value or answer, bool(sample.value))


def _encode(sample: Sample, tokenizer: ChatTokenizer) -> np.ndarray:
    kwargs: dict[str, Any] = {"enable_thinking": sample.thinking} | ({"tools": sample.tools} if sample.tools else {})
    return tokenizer.encode_chat(sample.messages[:-1], template_kwargs=kwargs)


def answers(runner: MLXRunner, asked: Sequence[Question]) -> dict[str, list[int]]:
    driver = Driver(runner, EngineConfig.model_validate({"prefix_cache": {"enabled": False}, "max_running": 8}))
    return driver.run({0: [question.request for question in asked]}, max_steps=10**6)


def is_right(question: Question, token_ids: list[int], tokenizer: ChatTokenizer) -> bool:
    ids = [token for token in token_ids if token not in question.request.stop_token_ids]
    detokenizer = tokenizer.detokenizer(())
    text = (detokenizer.push(tuple(ids)) + detokenizer.finish()).strip()
    expected = (question.expected or "").strip()
    return expected in text if question.is_part else text == expected


def num_equal(tokens: list[int], expected: list[int]) -> int:
    """Return how many tokens come before the first difference."""
    pairs = enumerate(zip(tokens, expected, strict=False))
    return next((i for i, (mine, other) in pairs if mine != other), min(len(tokens), len(expected)))


def steps_per_s(runner: MLXRunner, num_rows: int, prompt_tokens: int, num_steps: int) -> float:
    rng = random.Random(0)
    prompts = [np.array([rng.randrange(20, 4000) for _ in range(prompt_tokens)], np.int32) for _ in range(num_rows)]
    plain = SamplingParams(2**20, temperature=0.0)
    rows = [Row(EngineRequest(f"row {i}", prompt, plain, ())) for i, prompt in enumerate(prompts)]
    for row in rows:
        runner.prefill([row], prompt_tokens)
    for _ in range(4):
        runner.decode()
    began_s = time.perf_counter()
    for _ in range(num_steps):
        runner.decode()
    seconds = time.perf_counter() - began_s
    runner.drop([row.id for row in rows])
    return num_steps / seconds


def load(bits: int, dtype: str) -> MLXRunner:
    config = EngineConfig.model_validate({"kv_cache": {"bits": bits}, "dtype": dtype})
    return load_runner(config, lambda progress: None)


def speed(runners: dict[int, MLXRunner], args: argparse.Namespace) -> list[list[str]]:
    """Return rows of a table: steps per second, and their ratio to those of 16 bits in the same round."""
    rates: dict[tuple[int, int], list[float]] = {}
    for _ in range(args.rounds):
        for num_rows in BATCH_SIZES:
            for bits, runner in runners.items():
                rate = steps_per_s(runner, num_rows, args.prompt_tokens, args.steps)
                rates.setdefault((bits, num_rows), []).append(rate)
    rows = []
    for bits, runner in runners.items():
        cells = []
        for num_rows in BATCH_SIZES:
            own, plain = rates[bits, num_rows], rates[UNQUANTIZED_BITS, num_rows]
            ratio = Spread.of([mine / other for mine, other in zip(own, plain, strict=True)])
            cells.append(f"{Spread.of(own):.1f}, ratio {ratio:.2f}")
        rows.append([str(bits), str(runner.costs.token_bytes), *cells])
    return rows


def costs_of_shape(name: str, bits: int) -> MemoryCosts:
    """Return the memory costs of a shape in bfloat16 with its MTP head; base and chunks cost nothing."""
    config: dict[str, Any] = {"model_type": "qwen3_5", "text_config": text_config(SHAPES[name])}
    config["vision_config"] = {"model_type": "qwen3_5", "depth": 1, "hidden_size": 32, "num_heads": 2}
    arch: Any = get_model_and_args(dict(config))[0]
    module = arch.Model(arch.ModelConfig.from_dict(dict(config)))
    head = QwenHead(qwen3_5_mtp.ModelConfig.from_dict({"text_config": text_config(SHAPES[name])}))
    for part in (module, head):
        loader.cast(part, mx.bfloat16)
    language_model = LanguageModel(module.language_model, kv_bits=bits)
    row, layer = RowBytes.of(language_model), DraftingHead(head, language_model).make_cache()[0]
    head_bytes = sum(array.shape[1] * array.shape[3] * array.dtype.size for array in (layer.keys, layer.values))
    kv_format = kind_of(layer).kv_format(layer)
    return MemoryCosts(
        token_bytes=row.per_token + head_bytes,
        state_bytes=row.fixed,
        layer_share=head_bytes / (row.per_token + head_bytes),
        unpacked_bytes=0 if kv_format is None else kv_format.token_bytes,
        slots_step=SLOTS_STEP,
    )


def longest_context(name: str, bits: int) -> list[str]:
    costs = costs_of_shape(name, bits)
    needs = MemoryNeeds(costs, LIMIT_GIB * 2**30, reserve_tokens=4096)
    return [str(bits), str(costs.token_bytes), str(int(costs.unpacked_bytes)), str(needs.max_row_tokens())]


def measure(args: argparse.Namespace) -> None:
    tokenizer = ChatTokenizer(resolve_checkpoint("demo", None, weights=False))
    tasks = {name: list(questions(name, args.samples, tokenizer)) for name in NAMES}
    first: dict[str, dict[str, list[int]]] = {}
    quality, runners = [], {bits: load(bits, args.dtype) for bits in get_args(KVBits)}
    for bits, runner in runners.items():
        row = [str(bits)]
        for name, asked in tasks.items():
            got = answers(runner, asked)
            expected = first.setdefault(name, got)
            same = sum(num_equal(got[key], expected[key]) for key in expected) / sum(map(len, expected.values()))
            right = sum(is_right(one, got[one.request.request_id], tokenizer) for one in asked)
            row += ["-" if asked[0].expected is None else f"{right}/{len(asked)}", f"{same:.3f}"]
        quality.append(row)
    print(table(["bits", *(f"{name} {what}" for name in NAMES for what in ("right", "same"))], quality))
    print(table(["bits", "bytes per token", *(f"steps/s, rows: {num}" for num in BATCH_SIZES)], speed(runners, args)))
    columns = ["bits", "bytes per token", "dequantized", f"longest row in {LIMIT_GIB} GiB"]
    print(table(columns, [longest_context(args.shape, bits) for bits in get_args(KVBits)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-4b")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    print(heading("kv_bits_bench"))
    measure(args)


if __name__ == "__main__":
    main()
