"""Random MTP heads for the zoo's checkpoints."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import qwen3_5_mtp

from engine.worker.mtp_loader import SPLITTERS
from tests.support.zoo import drawn


def write_head(model_dir: Path, seed: int = 0) -> Path:
    """Write a random head that fits a checkpoint, in the split form; return its directory, `<model>-mtp`."""
    config = json.loads((model_dir / "config.json").read_text())
    text_config = SPLITTERS[config["model_type"]]().read_text_config(config) | {"mtp_num_hidden_layers": 1}
    head_config = {"model_type": "qwen3_5_mtp", "text_config": text_config}
    module = qwen3_5_mtp.Model(qwen3_5_mtp.ModelConfig.from_dict(json.loads(json.dumps(head_config))))
    rng = np.random.default_rng(seed)
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))  # type: ignore[arg-type]
    out = model_dir.parent / f"{model_dir.name}-mtp"
    out.mkdir()
    weights = {name: drawn(rng, name, weight) for name, weight in sorted(parameters.items())}
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    (out / "config.json").write_text(json.dumps(head_config))
    return out


def put_into_checkpoint(model_dir: Path) -> None:
    """Move the head from its own directory into the checkpoint, as `mtp.*` tensors."""
    head_dir = model_dir.parent / f"{model_dir.name}-mtp"
    weights: dict[str, mx.array] = dict(mx.load(str(model_dir / "model.safetensors")))  # type: ignore[arg-type]
    head: dict[str, mx.array] = dict(mx.load(str(head_dir / "model.safetensors")))  # type: ignore[arg-type]
    weights |= {f"mtp.{name}": weight for name, weight in head.items()}
    mx.eval(weights)
    mx.save_safetensors(str(model_dir / "model.safetensors"), weights, metadata={"format": "mlx"})
    for file in head_dir.iterdir():
        file.unlink()
    head_dir.rmdir()


def as_raw_head(model_dir: Path) -> dict[str, mx.array]:
    """Return the tensors of a split head as Qwen3-Next's published files name them: experts apart, norms less one."""
    head_dir = model_dir.parent / f"{model_dir.name}-mtp"
    raw: dict[str, mx.array] = {}
    for name, weight in mx.load(str(head_dir / "model.safetensors")).items():  # type: ignore[union-attr]
        if ".switch_mlp." in name:
            for i in range(weight.shape[0]):
                raw["mtp." + name.replace(".switch_mlp.", f".experts.{i}.")] = weight[i]
        else:
            raw[f"mtp.{name}"] = weight - 1.0 if weight.ndim == 1 and "norm" in name else weight
    return raw
