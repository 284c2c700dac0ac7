"""The time of one decode step by rows and draft tokens, against the time that reading the weights once takes.

    python -m tests.benchmarks.step_bench --shape qwen3.5-4b --rounds 5

The weights are random, so no draft would ever be right; what is measured is what a step costs, not what it brings.
With --profile also where the host spends a step: building the graph, handing it to the device, waiting for it.
"""

import argparse
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import numpy as np
from mlx_vlm.speculative.drafters import qwen3_5_mtp
from mlx_vlm.speculative.drafters.qwen3_dflash.config import DFlashConfig
from mlx_vlm.utils import get_model_and_args

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import Drafts
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import devices, loader
from engine.worker.heads.dflash import DFlashHead
from engine.worker.heads.eagle3 import Eagle3Head, eagle3_config
from engine.worker.heads.qwen import QwenHead
from engine.worker.layer_outputs import layers_of
from engine.worker.loaded_model import FoundProposer
from engine.worker.model_runner import MLXRunner
from tests.benchmarks.measure import Spread

SHAPES: dict[str, dict[str, int]] = {
    "qwen3.5-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 248320,
    },
    "qwen3.5-27b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "vocab_size": 248320,
    },
    "qwen3.5-0.8b": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248320,
    },
    "medium": {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 96,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 6,
        "vocab_size": 4096,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "vocab_size": 4096,
    },
}


def text_config(shape: dict[str, int]) -> dict[str, Any]:
    rotary = shape["head_dim"] // 4
    return shape | {
        "model_type": "qwen3_5_text",
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [rotary // 2 - 2 * (rotary // 6), rotary // 6, rotary // 6],
            "mrope_interleaved": True,
        },
    }


def random_head(form: str, shape: dict[str, int], language_model: Any) -> Any:
    """An MTP head, an EAGLE-3 head that knows 32,000 tokens or a DFlash drafter, in the model's sizes.

    The first two have one layer; the drafter has five, and reads as many of the model's.
    """
    if form == "mtp":
        return QwenHead(qwen3_5_mtp.ModelConfig.from_dict({"text_config": text_config(shape)}))
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    sizes = {name: shape[name] for name in names}
    if form == "dflash":
        num_layers = len(layers_of(language_model))
        read = [1 + (num_layers - 3) * i // 4 for i in range(5)]
        own = {"num_hidden_layers": 5, "block_size": 16, "mask_token_id": 0, "target_layer_ids": read}
        return DFlashHead(DFlashConfig(**sizes, **own), language_model)
    config = sizes | {"draft_vocab_size": min(32000, shape["vocab_size"] // 2)}
    head = Eagle3Head(eagle3_config(config), language_model)
    head.embed_tokens = None
    head.map_vocabulary(shape["vocab_size"])
    return head


def random_model(shape: dict[str, int], head_form: str = "mtp", bits: int = 16) -> loader.LoadedModel:
    """With the weights as the library initialises them, in bfloat16 on a GPU; or quantized, in groups of 64."""
    config = {"model_type": "qwen3_5", "text_config": text_config(shape), "vocab_size": shape["vocab_size"]}
    vision = {"model_type": "qwen3_5", "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    config["vision_config"] = vision | {"out_hidden_size": shape["hidden_size"]}
    arch: Any = get_model_and_args(dict(config))[0]
    module = arch.Model(arch.ModelConfig.from_dict(dict(config)))
    head = random_head(head_form, shape, module.language_model)
    dtype = mx.bfloat16 if devices.on_gpu() else mx.float32
    loader.cast(module, dtype)
    loader.cast(head, dtype)
    if bits < 16:
        nn.quantize(module.language_model, 64, bits)
        nn.quantize(head, 64, bits)
    mx.eval(module.parameters(), head.parameters())
    num_bytes = sum(w.nbytes for part in (module.language_model, head) for _, w in loader.weights_of(part))
    sizes = {"max_context_tokens": 131072, "vocab_size": shape["vocab_size"], "num_weight_bytes": num_bytes}
    return loader.LoadedModel(
        module=module,
        path=Path(),
        config=config,
        media_kinds=frozenset(),
        **sizes,
        dtype=str(dtype),
        quantized_weights="no quantized weights" if bits == 16 else f"{bits} bits",
        proposers={"mtp": FoundProposer("ready", module=head)},
        fingerprint="random",
    )


def bandwidth() -> float:
    """Bytes per second that a large array is read with, the best of some tries."""
    values = mx.ones((2**30 if devices.on_gpu() else 2**26,), mx.float32)
    mx.eval(values)
    best = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        mx.eval(mx.max(values))
        best = min(best, time.perf_counter() - began)
    return values.nbytes / best


def join(runner: MLXRunner, num_rows: int, prompt_tokens: int) -> list[str]:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(num_rows):
        ids = rng.integers(0, runner.vocab_size, prompt_tokens).astype(np.int32)
        rows.append(Row(EngineRequest(f"r{i}", ids, SamplingParams(10_000, 0.0), ())))
    for row in rows:
        while runner.prefill([row], 2048).first is None:
            pass
    return [row.id for row in rows]


def step_ms(runner: MLXRunner, num_rows: int, num_drafts: int, prompt_tokens: int, steps: int) -> float:
    ids = join(runner, num_rows, prompt_tokens)
    for _ in range(12):
        runner.decode(Drafts(num_drafts))
    began = time.perf_counter()
    for _ in range(steps):
        runner.decode(Drafts(num_drafts))
    seconds = time.perf_counter() - began
    runner.drop(ids)
    return seconds / steps * 1e3


def profile(runner: MLXRunner, num_rows: int, num_drafts: int, prompt_tokens: int) -> None:
    """Milliseconds per step of a step that is not overlapped with the next."""
    ids = join(runner, num_rows, prompt_tokens)
    group = runner._batch._groups[0]
    parts: dict[str, list[float]] = {"build": [], "hand over": [], "wait": []}
    real = mx.async_eval
    for _ in range(40):
        handed = 0.0

        def timed(*args: Any) -> None:
            nonlocal handed
            began = time.perf_counter()
            real(*args)
            handed += time.perf_counter() - began

        mx.async_eval = timed
        began = time.perf_counter()
        group._launched = launched = group._launch(Drafts(num_drafts))
        built = time.perf_counter() - began
        mx.async_eval = real
        began = time.perf_counter()
        launched.read()
        parts["wait"].append(time.perf_counter() - began)
        parts["build"].append(built - handed)
        parts["hand over"].append(handed)
    runner.drop(ids)
    text = ", ".join(f"{name} {np.median(values[5:]) * 1e3:.2f}" for name, values in parts.items())
    print(f"rows {num_rows}, drafts {num_drafts}, not overlapped, ms: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--head", choices=["mtp", "eagle3", "dflash"], default="mtp")
    parser.add_argument("--bits", type=int, choices=[4, 8, 16], default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    model = random_model(SHAPES[args.shape], args.head, args.bits)
    runner = MLXRunner(model, EngineConfig(compile=args.compile))
    floor_ms = model.num_weight_bytes / (speed := bandwidth()) * 1e3
    print(
        f"{args.shape}: {model.num_weight_bytes / 1e9:.2f} GB of weights, {speed / 1e9:.0f} GB/s, "
        f"reading them once takes {floor_ms:.2f} ms; {mx.default_device()}, MLX " + version("mlx")
    )
    arms = [(rows, drafts) for rows in args.rows for drafts in args.drafts]
    times: dict[tuple[int, int], list[float]] = {arm: [] for arm in arms}
    for round_number in range(args.rounds):
        for arm in arms[round_number % len(arms) :] + arms[: round_number % len(arms)]:
            times[arm].append(step_ms(runner, *arm, args.prompt_tokens, args.steps))
    for (rows, drafts), values in times.items():
        spread = Spread.of(values)
        plain = times.get((rows, 0))
        ratio = f", {spread.median / Spread.of(plain).median:.2f} x a plain step" if plain else ""
        print(f"rows {rows:2}, drafts {drafts}: {spread:.2f} ms, {spread.median / floor_ms:.2f} x the floor{ratio}")
    if args.profile:
        for rows in args.rows:
            profile(runner, rows, args.drafts[0], args.prompt_tokens)


if __name__ == "__main__":
    main()
