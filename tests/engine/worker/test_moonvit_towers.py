"""The towers of Kimi-VL and Kimi K2.5: the features of the library's forward, with the published arithmetic."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.kimi_k25.vision import Learnable2DInterpPosEmb
from mlx_vlm.utils import load_model

from engine.config import EngineConfig
from engine.processing.images import ImagePreprocessor
from engine.worker.patches import kimi_k25_tower, moonvit_arithmetic
from engine.worker.patches.moonvit_positions import positions
from engine.worker.vision import VisionEncoder
from engine.worker.vision_towers import make_tower
from tests.support.cold_runner import load_cold
from tests.support.kimi_family import KIMI_K25, KIMI_VL
from tests.support.sighted_family import IDS, SightedFamily
from tests.support.vision_zoo import image, make

SIZES = [(64, 40), (33, 64), (20, 20), (300, 20), (5, 5), (20, 300), (200, 190)]


@pytest.fixture(scope="module", params=[KIMI_VL, KIMI_K25], ids=["kimi_vl", "kimi_k25"])
def family(request: pytest.FixtureRequest) -> SightedFamily:
    return request.param


@pytest.fixture(scope="module")
def path(family: SightedFamily, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("moonvit") / "model", family)


@pytest.fixture(scope="module")
def module(path: Path) -> Any:
    return load_model(path)


def test_features_are_those_of_the_library(family: SightedFamily, path: Path, module: Any):
    preprocessor = ImagePreprocessor(path)
    vision = VisionEncoder(make_tower(module, family.config["model_type"]), preprocessor.normalization, 0)
    for size in SIZES:
        patches = preprocessor.patches(image(*size))
        ids = mx.full((1, patches.num_tokens), IDS["<image>"])
        made = {name: mx.array(value) for name, value in family.pixels([image(*size)]).items()}
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


def published_block(x: np.ndarray, block: Any, grid: tuple[int, int]) -> np.ndarray:
    """Compute a block [n, dim] as MoonViT does, in float64."""
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


def test_blocks_positions_and_projector_are_those_of_the_published_towers(path: Path, module: Any):
    """Only the library's weights are read: each step is written out, in float64."""
    preprocessor, tower = ImagePreprocessor(path), module.vision_tower
    is_k25 = module.config.model_type == "kimi_k25"
    projector = module.mm_projector if is_k25 else module.multi_modal_projector
    first, last = (projector.proj[0], projector.proj[2]) if is_k25 else (projector.linear_1, projector.linear_2)
    one, normalization = preprocessor.patches(image(72, 40)), preprocessor.normalization
    rows, columns = one.grid_thw[1:]
    mean, std = (np.array(value)[:, None, None] for value in (normalization.mean, normalization.std))
    proj, pixels = tower.patch_embed.proj, (one.patches / 255.0 - mean) / std
    x = np.einsum("nchw,ohwc->no", pixels, np.array(proj.weight)) + np.array(proj.bias)
    x = x + np.array(positions(tower.patch_embed.pos_emb, (rows, columns)))
    for block in tower.blocks:
        x = published_block(x, block, (rows, columns))
    x = normed(normed(x, tower.final_layernorm), projector.pre_norm)
    x = x.reshape(rows // 2, 2, columns // 2, 2, -1).transpose(0, 2, 1, 3, 4).reshape(rows * columns // 4, -1)
    inner = linear(x, first)
    x = linear(0.5 * inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))), last)
    found = VisionEncoder(make_tower(module, module.config.model_type), normalization, 0).encode(one)
    np.testing.assert_allclose(found, x, atol=2e-4, rtol=2e-4)


def test_the_corrections_of_gelu_and_norms_are_still_needed(module: Any, monkeypatch: pytest.MonkeyPatch):
    tower, library = module.vision_tower, sys.modules[type(module.vision_tower).__module__]
    for cls in moonvit_arithmetic.CORRECTIONS:
        monkeypatch.setattr(cls, "__init__", moonvit_arithmetic.LIBRARY[cls])
    made = library.VisionModel(module.config.vision_config)
    assert made.final_layernorm.eps == made.blocks[0].norm0.eps == made.blocks[0].norm1.eps == 1e-6
    wide = mx.linspace(-3, 3, 100)
    assert mx.abs(made.blocks[0].mlp.activation_fn(wide) - tower.blocks[0].mlp.activation_fn(wide)).max() > 1e-4


def test_the_correction_of_kimi_k25s_positions_is_still_needed():
    embeddings = Learnable2DInterpPosEmb(4, 4, 8)
    embeddings.weight = mx.random.normal((4, 4, 8), key=mx.random.key(0))
    x, shape = mx.zeros((60, 8)), mx.array([[6, 10]])
    assert mx.abs(kimi_k25_tower.library_positions(embeddings, x, shape) - embeddings(x, shape)).max() > 0.05


def test_checkpoint_with_the_published_names_of_sizes_gives_the_same_features(tmp_path: Path):
    """As published, but for the names of weights, which the library changes itself."""
    path = make(tmp_path / "own", KIMI_K25)
    config = json.loads((path / "config.json").read_text())
    vision = config["vision_config"]
    names = {"depth": "vt_num_hidden_layers", "num_heads": "vt_num_attention_heads", "embed_dim": "vt_hidden_size"}
    names |= {"intermediate_size": "vt_intermediate_size", "hidden_size": "mm_hidden_size"}
    renamed = {names.get(name, name): value for name, value in vision.items()} | {"model_type": ""}
    other = tmp_path / "published"
    other.mkdir()
    for file in path.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text(json.dumps({**config, "vision_config": renamed}))
    found = []
    for folder in (path, other):
        vision_encoder = load_cold(EngineConfig(model=str(folder)))._vision
        assert vision_encoder is not None
        found.append(np.array(vision_encoder.encode(ImagePreprocessor(folder).patches(image(64, 40)))))
    np.testing.assert_array_equal(*found)
