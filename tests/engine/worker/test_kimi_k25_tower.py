"""Kimi K2.5's tower: the features of the library's forward, with the arithmetic of transformers."""

import json
import math
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.kimi_k25 import vision as library
from mlx_vlm.utils import load_model

from engine.config import EngineConfig
from engine.processing.images import ImagePreprocessor
from engine.worker.kimi_k25_tower import KimiK25Tower
from engine.worker.patches import kimi_k25_tower
from engine.worker.patches.moonvit_positions import positions
from engine.worker.vision import VisionEncoder
from tests.support.cold_runner import load_cold
from tests.support.kimi_family import KIMI_K25
from tests.support.sighted_family import IDS
from tests.support.vision_zoo import image, make

SIZES = [(64, 40), (33, 64), (20, 20), (300, 20), (5, 5), (20, 300), (200, 190)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("kimi_k25") / "model", KIMI_K25)


@pytest.fixture(scope="module")
def module(path: Path) -> Any:
    return load_model(path)


def test_features_are_those_of_the_library(path: Path, module: Any):
    preprocessor = ImagePreprocessor(path)
    vision = VisionEncoder(KimiK25Tower(module), preprocessor.normalization, 0)
    for size in SIZES:
        patches = preprocessor.patches(image(*size))
        ids = mx.full((1, patches.num_tokens), IDS["<image>"])
        made = {name: mx.array(value) for name, value in KIMI_K25.pixels([image(*size)]).items()}
        expected = module.get_input_embeddings(ids, **made).inputs_embeds[0]
        np.testing.assert_allclose(vision.encode(patches), expected, rtol=1e-4, atol=1e-4, err_msg=str(size))


def normed(x: np.ndarray, norm: Any) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * np.array(norm.weight) + np.array(norm.bias)


def linear(x: np.ndarray, layer: Any) -> np.ndarray:
    return x @ np.array(layer.weight, np.float64).T + np.array(layer.bias)


def turned(x: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Rotate the pairs of heads [n, heads, dim]: even pairs by the column, odd ones by the row."""
    rows, columns = (place.reshape(-1) for place in np.mgrid[: grid[0], : grid[1]])
    frequencies = 10000.0 ** -(np.arange(0, x.shape[-1], 4) / x.shape[-1])
    angles = np.stack([columns[:, None] * frequencies, rows[:, None] * frequencies], -1).reshape(len(x), 1, -1)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def transformers_block(x: np.ndarray, block: Any, grid: tuple[int, int]) -> np.ndarray:
    """Compute a block [n, dim] as transformers' Kimi K2.5 does, in float64."""
    heads = block.attn.num_heads
    projected = linear(normed(x, block.norm0), block.attn.wqkv).reshape(len(x), 3, heads, -1)
    queries, keys, values = turned(projected[:, 0], grid), turned(projected[:, 1], grid), projected[:, 2]
    scores = np.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(queries.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + linear(np.einsum("hqk,khd->qhd", weights, values).reshape(len(x), -1), block.attn.wo)
    inner = linear(normed(x, block.norm1), block.mlp.fc0)
    activated = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    return x + linear(activated, block.mlp.fc1)


def test_blocks_positions_and_projector_are_those_of_transformers(path: Path, module: Any):
    """Only the library's weights are read: each step is written out."""
    preprocessor, tower = ImagePreprocessor(path), module.vision_tower
    one = preprocessor.patches(image(72, 40))
    rows, columns = one.grid_thw[1:]
    mean, std = (
        np.array(value)[:, None, None] for value in (preprocessor.normalization.mean, preprocessor.normalization.std)
    )
    pixels = (one.patches / 255.0 - mean) / std
    proj = tower.patch_embed.proj
    x = np.einsum("nchw,ohwc->no", pixels, np.array(proj.weight)) + np.array(proj.bias)
    x = x + np.array(positions(tower.patch_embed.pos_emb, (rows, columns)))
    for block in tower.blocks:
        x = transformers_block(x, block, (rows, columns))
    x = normed(normed(x, tower.final_layernorm), module.mm_projector.pre_norm)
    x = x.reshape(rows // 2, 2, columns // 2, 2, -1).transpose(0, 2, 1, 3, 4).reshape(rows * columns // 4, -1)
    inner = linear(x, module.mm_projector.proj[0])
    x = linear(0.5 * inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))), module.mm_projector.proj[2])
    found = VisionEncoder(KimiK25Tower(module), preprocessor.normalization, 0).encode(one)
    np.testing.assert_allclose(found, x, atol=2e-4, rtol=2e-4)


def test_the_patch_is_still_needed(module: Any, monkeypatch: pytest.MonkeyPatch):
    tower, config = module.vision_tower, module.config.vision_config
    shape = mx.array([[6, 10]])
    x = mx.random.normal((60, config.embed_dim), key=mx.random.key(0))
    own = tower.patch_embed.pos_emb(x, shape)
    for name in (library.MLP, library.Qwen2VLVisionBlock, library.VisionModel):
        monkeypatch.setattr(name, "__init__", kimi_k25_tower.LIBRARY[name])
    monkeypatch.setattr(
        library.Learnable2DInterpPosEmb, "__call__", kimi_k25_tower.LIBRARY[library.Learnable2DInterpPosEmb]
    )
    assert mx.abs(tower.patch_embed.pos_emb(x, shape) - own).max() > 0.02
    made = library.VisionModel(config)
    assert made.final_layernorm.eps == made.blocks[0].norm0.eps == made.blocks[0].norm1.eps == 1e-6
    wide = mx.linspace(-3, 3, 100)
    assert mx.abs(made.blocks[0].mlp.activation_fn(wide) - tower.blocks[0].mlp.activation_fn(wide)).max() > 1e-4


def test_checkpoint_with_the_published_names_of_sizes_gives_the_same_features(path: Path, tmp_path: Path):
    """As published, but for the names of weights, which the library changes itself."""
    config = json.loads((path / "config.json").read_text())
    vision = config["vision_config"]
    names = {"depth": "vt_num_hidden_layers", "num_heads": "vt_num_attention_heads", "embed_dim": "vt_hidden_size"}
    names |= {"intermediate_size": "vt_intermediate_size", "hidden_size": "mm_hidden_size"}
    renamed = {names.get(name, name): value for name, value in vision.items()} | {"model_type": ""}
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": renamed}))
    found = []
    for folder in (path, tmp_path):
        vision_encoder = load_cold(EngineConfig(model=str(folder)))._vision
        assert vision_encoder is not None
        found.append(np.array(vision_encoder.encode(ImagePreprocessor(folder).patches(image(64, 40)))))
    np.testing.assert_array_equal(*found)
