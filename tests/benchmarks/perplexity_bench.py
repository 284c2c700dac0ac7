"""Measures the cost of `kv_cache.bits` on real text: perplexity of SmolLM2 135M and Gemma 3 270M with 16, 8 and 4 bits.

    uv run python -m tests.benchmarks.perplexity_bench [--models smollm2,gemma3] [--tokens 2000]

The texts are documents and sources of this repository, whose logprobs the engine reports itself (`prompt_logprobs`).
Every key that a token attends to has been stored with these bits, those of its own chunk among them. In float32. The
loss is that of the perplexity relative to 16 bits, of each text.
"""

import argparse
import sys
from typing import get_args

import engine.worker  # noqa: F401  # before MLX

from mlx_lm.utils import load_tokenizer  # isort: skip
import numpy as np

from engine.config import KVBits
from engine.worker.quantized_kv import UNQUANTIZED_BITS
from tests.benchmarks.measure import Spread, heading, table
from tests.support import gemma3
from tests.support.perplexity import perplexity, text_logprobs
from tests.support.real_weights import float32_smollm2, load_engine, text_prompts

MODELS = {"smollm2": float32_smollm2, "gemma3": gemma3.checkpoint}
NUM_TEXTS = 4


def measure(name: str, num_tokens: int) -> list[list[str]]:
    """Return rows of the table, one per number of bits."""
    path = MODELS[name]()
    tokenizer = load_tokenizer(str(path))
    texts = text_prompts(tokenizer, [num_tokens] * NUM_TEXTS, is_chat=False)
    if name == "gemma3":
        texts = [[tokenizer.bos_token_id, *text] for text in texts]
    rows, plain = [], list[float]()
    for bits in sorted(get_args(KVBits), reverse=True):
        runner = load_engine(path, max_running=1, kv_cache={"bits": bits})
        logprobs = text_logprobs(runner, texts, bits)
        each = [perplexity(one) for one in logprobs]
        plain = each if bits == UNQUANTIZED_BITS else plain
        loss = [(mine / other - 1) * 100 for mine, other in zip(each, plain, strict=True)]
        total = f"{perplexity(np.concatenate(logprobs)):.4f}"
        rows.append([name, str(bits), str(runner.costs.token_bytes), total, f"{Spread.of(loss):.3f}"])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def main() -> int:
    """Measure the models and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()
    print(heading("perplexity_bench"))
    rows = [row for name in args.models.split(",") for row in measure(name, args.tokens)]
    print(table(["model", "bits", "bytes per token", "perplexity", "loss per text, %"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
