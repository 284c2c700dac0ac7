"""NomicBERT: its two forms of config.json and names of weights, and which fields it computes with."""

import json
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from deployments.planners.prompt_planner import PromptPlanner
from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.worker import encoder_loader
from tests.engine.worker.test_encoders import DYNAMIC, cold, config_of, tokens
from tests.support.encoders import HIDDEN, INNER, LAYERS, POSITIONS, PUBLISHED_NOMIC, make_encoder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; supported is silu"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type 'absolute'; supported is rope"),
        ({"is_decoder": True}, "is_decoder True"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; supported is 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope of the type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope of the type 'linear'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, r"dynamic rope with the factors \[\]"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, r"dynamic rope with the factors \[0.5\]"),
        ({"rotary_scaling_factor": 2, "rope_parameters": {"rope_type": "default"}}, "they must be one"),
        ({"rotary_emb_base": 1000, "rope_theta": 10000.0}, "several bases of the rope"),
        ({"n_embd": 64}, "n_embd 64 and hidden_size 32; they must be equal"),
        ({"moe_every_n_layers": 2}, "moe_every_n_layers 2"),
        *[
            ({name: value}, f"{name} {value!r}")
            for name, value in {
                "activation_function": "gelu",
                "causal": True,
                "mlp_fc1_bias": True,
                "mlp_fc2_bias": True,
                "parallel_block": True,
                "parallel_block_tied_norm": True,
                "prenorm": True,
                "qkv_proj_bias": True,
                "rotary_emb_fraction": 0.5,
                "rotary_emb_interleaved": True,
                "rotary_emb_scale_base": 512,
                "scale_attn_by_inverse_layer_idx": True,
                "scale_attn_weights": False,
                "use_rms_norm": True,
            }.items()
        ],
    ],
)
def test_nomic_berts_with_another_arithmetic_are_refused_by_name(tmp_path, changes, reason):
    path = make_encoder(tmp_path / "model", "nomic_bert", **changes)
    (path / "model.safetensors").unlink()
    with pytest.raises(EngineFailed, match=reason):
        encoder_loader.open_encoder(config_of(path))


def publish_config(path: Path, **changes: Any) -> None:
    """Rewrite config.json with the names of the published code."""
    fields = {"model_type": "nomic_bert", "architectures": ["NomicBertModel"], **PUBLISHED_NOMIC, **changes}
    fields = {name: value for name, value in fields.items() if value != "left out"}
    (path / "config.json").write_text(json.dumps(fields))


def publish(path: Path, **changes: Any) -> Path:
    """Rewrite a NomicBERT with the names of the published code."""
    publish_config(path, **changes)
    weights: Any = mx.load(str(path / "model.safetensors"))
    names = {
        "embeddings.LayerNorm": "emb_ln",
        "self_attn.o_proj": "attn.out_proj",
        "gate_proj": "fc12",
        "up_proj": "fc11",
        "down_proj": "fc2",
        "post_attention_layernorm": "norm1",
        "post_mlp_layernorm": "norm2",
    }
    found = {}
    for name, weight in weights.items():
        for own, published in names.items():
            name = name.replace(own, published)
        found["encoder." * name.startswith("layers.") + name] = weight
    for i in range(LAYERS):
        parts = [found.pop(f"encoder.layers.{i}.self_attn.{part}_proj.weight") for part in "qkv"]
        found[f"encoder.layers.{i}.attn.Wqkv.weight"] = mx.concatenate(parts)
        found[f"encoder.layers.{i}.attn.rotary_emb.inv_freq"] = mx.zeros(4)
    assert found["encoder.layers.0.mlp.fc2.weight"].shape == (HIDDEN, INNER)
    mx.save_safetensors(str(path / "model.safetensors"), found, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("factor", [None, 3])
def test_a_nomic_bert_with_the_published_names_is_the_one_with_those_of_transformers(tmp_path, factor):
    rope = {"rope_type": "dynamic", "factor": factor} if factor else {"rope_type": "default"}
    fields = {"max_position_embeddings": 40, "rope_parameters": {**rope, "rope_theta": 1000.0}}
    native = cold(make_encoder(tmp_path / "native", "nomic_bert", **fields))
    changes = {"max_trained_positions": 40, "n_positions": 130, "rotary_scaling_factor": factor}
    published = cold(publish(make_encoder(tmp_path / "published", "nomic_bert"), **changes))
    assert (native.max_context_tokens, published.max_context_tokens) == ((120, 130) if factor else (40, 40))
    texts = [np.array(tokens(n, n), np.int32) for n in ((90, 12) if factor else (40, 12))]
    known, found = (runner._model.hidden(texts, [5, None]) for runner in (native, published))
    assert mx.array_equal(known, found)


@pytest.mark.parametrize(
    "name", ["activation_function", "mlp_fc1_bias", "mlp_fc2_bias", "qkv_proj_bias", "rotary_emb_fraction"]
)
def test_a_published_field_that_is_left_out_has_the_default_of_the_published_code(tmp_path, name):
    path = publish(make_encoder(tmp_path / "model", "nomic_bert"), **{name: "left out"})
    with pytest.raises(EngineFailed, match=f"config.json has {name}"):
        encoder_loader.open_encoder(config_of(path))


def test_constants_that_the_published_config_leaves_out_are_those_of_the_published_code(tmp_path):
    names = ("layer_norm_epsilon", "max_trained_positions", "rotary_emb_base")
    path = publish(make_encoder(tmp_path / "model", "nomic_bert"), **dict.fromkeys(names, "left out"))
    found = encoder_loader.open_encoder(config_of(path)).module.config
    assert (found.layer_norm_eps, found.max_position_embeddings, found.rope_theta) == (1e-5, 2048, 10000.0)


def test_a_nomic_bert_is_refused_beyond_its_training_without_a_rope_that_grows(tmp_path):
    path = make_encoder(tmp_path / "model", "nomic_bert")
    with pytest.raises(EngineFailed, match=rf"max_context_tokens is {4 * POSITIONS}; the model's limit is {POSITIONS}"):
        cold(path, max_context_tokens=4 * POSITIONS)
    assert cold(make_encoder(tmp_path / "long", "nomic_bert", **DYNAMIC)).max_context_tokens == 120


@pytest.mark.parametrize("repository", ["", "nomic-ai/nomic-bert-2048--"])
def test_the_code_that_published_checkpoints_name_is_computed_without_running_it(tmp_path, repository):
    names = {
        "AutoConfig": "configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "modeling_hf_nomic_bert.NomicBertModel",
        "AutoModelForMaskedLM": "modeling_hf_nomic_bert.NomicBertForPreTraining",
    }
    auto_map = {kind: repository + name for kind, name in names.items()}
    path = publish(make_encoder(tmp_path / "model", "nomic_bert"), auto_map=auto_map)
    (path / "modeling_hf_nomic_bert.py").write_text("raise AssertionError")
    encoder_loader.open_encoder(config_of(path))
    PromptPlanner(EngineConfig(model=str(path)))
    for changed in (auto_map | {"AutoModel": repository + "modeling_evil.NomicBertModel"}, ["evil.py"]):
        publish_config(path, auto_map=changed)
        for opening in (lambda: encoder_loader.open_encoder(config_of(path)), lambda: PromptPlanner(config_of(path))):
            with pytest.raises(EngineFailed, match="'auto_map' names Python code"):
                opening()
    publish_config(path, auto_map=auto_map)
    (path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "tokenization.Evil"}}')
    with pytest.raises(EngineFailed, match=r"tokenizer_config\.json: 'auto_map' names Python code"):
        encoder_loader.open_encoder(config_of(path))


def test_another_family_may_not_name_that_code(tmp_path):
    auto_map = {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"}
    with pytest.raises(EngineFailed, match="'auto_map' names Python code"):
        encoder_loader.open_encoder(config_of(make_encoder(tmp_path / "model", "bert", auto_map=auto_map)))
