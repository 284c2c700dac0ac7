"""How much sooner prompt lookup gives edited code: tokens per second on real edits, beside plain decoding.

    uv run python -m tests.benchmarks.code_edits_bench [--rounds 3] [--edits 0,1,2]

SmolLM2-135M-Instruct in float32 reads a module of this repository and a change that is asked for
(tests/support/code_edits.py). So small a model cannot edit code: a matcher forces the true answer, so that every step
is computed, drafted, verified and accepted as usual. Both arms have the matcher, in turns, each with a fresh engine
around the same loaded model; one row at a time. Tokens per second are those after the first token.
"""

import argparse
import sys
from collections import defaultdict
from statistics import median
from typing import Any

import engine.worker  # noqa: F401  # before MLX
from engine.processing.tokenizer import ChatTokenizer
from tests.benchmarks.measure import Spread, heading, table
from tests.benchmarks.proposer_bench import OFF, Job, measure
from tests.support.code_edits import EDITS
from tests.support.real_weights import float32_smollm2, greedy, load_engine

ARMS: dict[str, dict[str, Any]] = {"plain": OFF, "prompt lookup": OFF | {"prompt_lookup": "auto"}}


def main() -> int:
    """Measure the edits and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--edits", default=",".join(map(str, range(len(EDITS)))), help="their indices")
    args = parser.parse_args()
    print(heading("code_edits_bench"))
    path = float32_smollm2()
    runner, tokenizer = load_engine(path), ChatTokenizer(path)
    medians, rows = [], []
    for edit in (EDITS[int(index)] for index in args.edits.split(",")):
        prompt, answer = edit.prompt(tokenizer), edit.answer(tokenizer)
        job = Job(greedy("r", prompt.tolist(), len(answer)), answer)
        rates: dict[str, list[float]] = defaultdict(list)
        drafted = accepted = 0
        for _ in range(args.rounds):
            for arm, config in ARMS.items():
                result = measure(runner, config, [job], num_warm_ups=0)
                assert result.tokens["r"] == answer.tolist()
                rates[arm].append(result.tokens_per_s)
                drafted += result.figures["prompt_lookup drafted"]
                accepted += result.figures["prompt_lookup accepted"]
        ratios = [fast / slow for fast, slow in zip(rates["prompt lookup"], rates["plain"], strict=True)]
        medians.append(median(ratios))
        speeds = [f"{Spread.of(rates[arm]):.1f}" for arm in ARMS]
        share = f"{accepted / drafted:.2f}" if drafted else "-"
        rows.append([edit.path, f"{len(prompt)}, {len(answer)}", *speeds, f"{Spread.of(ratios):.2f}", share])
        print(*rows[-1], sep=" | ", flush=True)
    columns = ["module", "tokens of prompt, answer", *(f"{arm}, tokens/s" for arm in ARMS), "× plain", "accepted"]
    print(table(columns, rows))
    print(f"× plain over {len(medians)} edits: {Spread.of(medians):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
