"""Tiny checkpoints as sentence-transformers saves them: a decoder with bare names, without its output layer."""

import json
import shutil
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip

from engine.demo import DEMO_MODEL
from tests.support.families import FAMILIES
from tests.support.families.family import Family
from tests.support.zoo import make

PROMPTS = {"query": "Instruct: find the answer\nQuery: ", "document": ""}
MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))


def make_embedding_model(out: Path, family: str, mode: str, **changes: Any) -> Path:
    """Write a family's checkpoint. mode: such as lasttoken. changes: of config.json."""
    config = {**FAMILIES[family].config, **changes}
    make(out, Family(config, "", seed=FAMILIES[family].seed))
    weights: Any = mx.load(str(out / "model.safetensors"))
    bare = {name.removeprefix("language_model.").removeprefix("model."): weight for name, weight in weights.items()}
    kept = {name: weight for name, weight in bare.items() if not name.startswith("lm_head.")}
    mx.save_safetensors(str(out / "model.safetensors"), kept, metadata={"format": "pt"})
    return describe_embeddings(out, mode)


def describe_embeddings(model_dir: Path, mode: str = "lasttoken", **settings: Any) -> Path:
    """Add the files of sentence-transformers to a checkpoint. settings: of config_sentence_transformers.json."""
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(MODULES)
    ]
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {f"pooling_mode_{mode}": True, "include_prompt": True},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None, **settings},
    }
    (model_dir / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        (model_dir / name).write_text(json.dumps(content))
    return model_dir


def demo_embedding_model(out: Path, **settings: Any) -> Path:
    """The demo model as an embedding model, with its tokenizer."""
    shutil.copytree(DEMO_MODEL, out, ignore=shutil.ignore_patterns("draft", "*.md"))
    return describe_embeddings(out, **settings)
