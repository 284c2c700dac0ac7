"""Prints the tokens of families of the tests' zoo on one device, as JSON.

Usage: `python -m tests.metal.zoo_run DEVICE DIR FAMILY ..`. DEVICE: plain for MLX as it is, gpu for an emulated Mac,
cpu for the CPU device of one. DIR: for checkpoints and kernels. A family that fails has its error instead of tokens.
"""

import json
import sys
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import PLAIN, Drafts
from engine.protocol import EngineRequest, SamplingParams
from tests.metal import emulator
from tests.support import families

LIMITS = {"max_context_tokens": 192, "max_running": 4}
"""So that the warm-up times only small chunks and batches."""

NUM_STEPS, CHUNK_TOKENS, NUM_TOKENS = 12, 16, 24


def main(device: str, directory: Path, names: list[str]) -> None:
    if device == "plain":
        mx.disable_compile()  # fused operations round differently
    else:
        emulator.install(directory / "kernels", on_gpu=device == "gpu")
    sys.stdout.write(json.dumps({name: tokens_of(name, device, directory / name) for name in names}))


def tokens_of(name: str, device: str, path: Path) -> dict[str, list[int]] | str:
    from tests.support import zoo
    from tests.support.cold_runner import load_cold  # after `install`, as libraries look at the device when imported

    try:
        if not path.exists():
            zoo.make(path, families.FAMILIES[name])
        where = {"device": "auto", "share_device": True} if device == "gpu" else {"device": "cpu"}
        config = EngineConfig.model_validate(
            {"model": str(path), "expand_quantized_weights": "off", "dtype": "float32", **LIMITS, **where}
        )
        runner = load_cold(config)
        prompts = {"a": zoo.prompt(45), "b": zoo.prompt(13, seed=2)}
        return answers(runner, prompts)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def answers(runner, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Decode both prompts in one batch, every second step with drafts where the family takes them."""
    rows, tokens = [], {}
    for name, ids in prompts.items():
        row = Row(EngineRequest(name, np.array(ids, np.int32), SamplingParams(NUM_TOKENS, temperature=0.0), ()))
        while not (first := runner.prefill([row], CHUNK_TOKENS).first):
            pass
        tokens[row.id] = list(first[row.id].token_ids)
        rows.append(row)
    drafts = PLAIN if "prompt_lookup" in runner.no_drafts else Drafts(3, "prompt_lookup", is_forced=True)
    for step in range(NUM_STEPS):
        for row_id, output in runner.decode(drafts if step % 2 else PLAIN).items():
            tokens[row_id] += output.token_ids
    runner.drop([row.id for row in rows])
    return {name: ids[:NUM_STEPS] for name, ids in tokens.items()}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
