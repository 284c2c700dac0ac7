"""Heads of Nemotron-H in a published checkpoint, split off by the library, and such that are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest
from mlx_vlm.speculative.drafters.nemotron_h_mtp.split import NemotronHMTPSplitter

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.worker import loader
from tests.support.families import FAMILIES
from tests.support.heads import write_head
from tests.support.zoo import make


def published(model_dir: Path, head_dir: Path) -> Path:
    """Write a head into the checkpoint of its model as NVIDIA publishes it: `mtp.*`, experts apart."""
    target: Any = mx.load(str(model_dir / "model.safetensors"))
    weights = {name.removeprefix("language_model."): weight for name, weight in target.items()}
    head: Any = mx.load(str(head_dir / "model.safetensors"))
    for name, weight in head.items():
        if ".switch_mlp." in name:
            apart = name.replace("switch_mlp.fc1", "experts.#.up_proj").replace("switch_mlp.fc2", "experts.#.down_proj")
            weights |= {"mtp." + apart.replace("#", str(i)): weight[i] for i in range(weight.shape[0])}
        else:
            weights[f"mtp.{name}"] = weight
    out = shutil.copytree(model_dir, model_dir.parent / "published")
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "pt"})
    config = json.loads((head_dir / "config.json").read_text())["text_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


def head_weights(**config: Any) -> dict[str, mx.array]:
    loaded = loader.load(EngineConfig.model_validate(config), lambda progress: None)
    assert loaded.proposers["mtp"].module is not None, loaded.proposers["mtp"].status
    return dict(loader.weights_of(loaded.proposers["mtp"].module))


def test_head_in_a_published_checkpoint_or_split_off_by_the_library_is_the_head_beside_the_model(tmp_path):
    path = make(tmp_path / "model", FAMILIES["nemotron_h"])
    head_dir = write_head(path)
    expected = head_weights(model=str(path))
    inside = published(path, head_dir)
    split = NemotronHMTPSplitter().split(str(inside), str(tmp_path / "split"))
    for found in (
        head_weights(model=str(inside)),
        head_weights(model=str(path), mtp_head=str(inside)),
        head_weights(model=str(path), mtp_head=str(split)),
    ):
        assert found.keys() == expected.keys()
        assert all(mx.array_equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mtp_hybrid_override_pattern": "E"}, r"its layers are 'E', expected a '\*' for attention"),
        ({"mtp_hybrid_override_pattern": "*M"}, "requires an attention/MoE layer pattern"),
        ({"num_nextn_predict_layers": 2}, "requires num_nextn_predict_layers=1"),
        ({"hidden_size": 32}, "does not fit the model: hidden_size is 32, expected 64"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ],
)
def test_head_that_does_not_fit_is_refused_with_the_reason(changes, reason, tmp_path):
    path = make(tmp_path / "model", FAMILIES["nemotron_h"])
    head_dir = write_head(path)
    config = json.loads((head_dir / "config.json").read_text())
    config["text_config"] |= changes
    (head_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFailed, match=reason):
        loader.load(EngineConfig(model=str(path)), lambda progress: None)


def test_head_of_another_family_is_refused(tmp_path):
    path = make(tmp_path / "model", FAMILIES["nemotron_h"])
    other = write_head(make(tmp_path / "other", FAMILIES["deepseek_v3"]))
    expected = "model_type is 'deepseek_v3', expected one of nemotron_h_mtp, nemotron_h, nemotron_h_nano_omni"
    with pytest.raises(EngineFailed, match=expected):
        loader.load(EngineConfig(model=str(path), mtp_head=str(other)), lambda progress: None)
