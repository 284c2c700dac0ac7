"""The library's modules of families that are refused by name still have the property that the reason names.

When one of these tests fails, see whether the family can be served. Families whose prompts depend on how they are cut
are in test_family.py.
"""

import copy
import json
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import get_model_and_args

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.worker import loader
from engine.worker.patches import glm5_next_rows
from engine.worker.refused_families import DECISIONS, REFUSED
from tests.support import zoo
from tests.support.families import FAMILIES
from tests.support.families.family import TOWER, text

BLOCK = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}
LINEAR = BLOCK | {"attention": {"replace_with_linear": True}}
DECODER = {"d_model": 32, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "decoder_layers": 1, "vocab_size": 64}
ENCODER = {"encoder_attention_heads": 2, "encoder_ffn_dim": 32, "encoder_layers": 1}


def logits(lm: Any, token_ids: list[int], cache: Any, **arguments: Any) -> np.ndarray:
    """Return the logits [L, vocab] of one row."""
    return np.array(lm(mx.array([token_ids], mx.int32), cache=cache, **arguments).logits[0])


def library(family: str) -> Any:
    """Return the library's package of a family."""
    return get_model_and_args({"model_type": family})[0]


def falcon(family: str) -> Any:
    """Return the language model of one of the Falcons, with its initial weights."""
    config = library(family).ModelConfig.from_dict(text(family))
    return library(family).LanguageModel(config.text_config, config)


def test_a_linear_layer_in_place_of_attention_is_refused_by_its_layer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(text("nemotron-nas", block_configs=[BLOCK, LINEAR, BLOCK])))
    with pytest.raises(EngineFailed, match=r"family nemotron-nas .*layer 1 has a linear layer.*replace_with_linear"):
        loader.load(EngineConfig(model=str(tmp_path), device="cpu"), lambda progress: None)


def test_nothing_fills_the_cache_of_a_linear_layer_in_place_of_attention():
    lm = zoo.new_module(text("nemotron_nas", block_configs=[BLOCK, LINEAR, BLOCK])).language_model
    cache = make_prompt_cache(lm)
    logits(lm, [1, 2, 3], cache)
    assert [layer.empty() for layer in cache] == [False, True, False]


def test_an_index_without_the_tail_is_refused(tmp_path):
    config = copy.deepcopy(FAMILIES["glm5_next"].config)
    config["text_config"]["index_kpool_always_select_tail"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFailed, match=r"family glm5_next .*its first tokens see no token"):
        loader.load(EngineConfig(model=str(tmp_path), device="cpu"), lambda progress: None)


def test_the_first_tokens_of_an_index_without_the_tail_see_no_token():
    config = copy.deepcopy(FAMILIES["glm5_next"].config)
    config["text_config"]["index_kpool_always_select_tail"] = False
    indexer = zoo.new_module(config).language_model.layers[1].self_attn.indexer
    seen = glm5_next_rows.LIBRARY["index"](indexer, mx.zeros((1, 6, 64)), mx.zeros((1, 6, 32)))
    assert (np.array(seen)[0] >= 0).sum(axis=1).tolist() == [0, 0, 0, 4, 4, 4]


@pytest.mark.parametrize(("name", "value"), [("norm_after", True), ("rope_scaling_layers", [0])])
def test_fields_of_molmo2_that_change_no_logit_are_refused(name: str, value: Any, tmp_path):
    config = copy.deepcopy(FAMILIES["molmo2"].config)
    mx.random.seed(0)
    plain = zoo.new_module(config).language_model
    config["text_config"][name] = value
    other = zoo.new_module(config).language_model
    other.update(plain.parameters())
    first, second = (logits(lm, [1, 2, 3], make_prompt_cache(lm)) for lm in (plain, other))
    np.testing.assert_array_equal(first, second)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFailed, match=rf"family molmo2 .*config\.json has {name} .* does not read"):
        loader.load(EngineConfig(model=str(tmp_path), device="cpu"), lambda progress: None)


@pytest.mark.parametrize("family", [name for name, reason in REFUSED.items() if reason == DECISIONS])
def test_the_library_says_that_a_family_makes_decisions(family: str):
    assert library(family).Model.decision_types


def test_falcon_perception_lets_tokens_of_a_prompt_see_those_after_them():
    lm = falcon("falcon_perception")
    first, second = (logits(lm, [1, 2, 3, last], make_prompt_cache(lm)) for last in (4, 5))
    assert not np.allclose(first[:3], second[:3], atol=1e-3)


def test_falcon_ocr_takes_the_positions_of_one_prompt_for_the_next():
    lm = falcon("falcon_ocr")

    def second_chunk() -> np.ndarray:
        cache = make_prompt_cache(lm)
        logits(lm, [1, 2, 3], cache)
        return logits(lm, [4, 5], cache)

    before = second_chunk()
    logits(lm, [6, 7, 8], make_prompt_cache(lm), rope_deltas=mx.array([[-2]]))
    assert not np.allclose(second_chunk(), before, atol=1e-3)


def test_diffusion_gemma_gives_logits_of_a_block_of_tokens_and_not_of_its_prompt():
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"), 32)
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"), 2)
    sizes |= {"head_dim": 16, "global_head_dim": 16, "num_experts": 2, "top_k_experts": 1, "num_hidden_layers": 1}
    config = library("diffusion_gemma").ModelConfig.from_dict({"text_config": sizes, "canvas_length": 5})
    lm = library("diffusion_gemma").LanguageModel(config.text_config, config)
    assert len(logits(lm, [1, 2, 3], lm.make_cache())) == 5


def test_florence_reads_a_whole_document_before_its_first_token():
    lm = library("florence2").LanguageModel(library("florence2").TextConfig(**DECODER, **ENCODER))
    first, second = (logits(lm, [1, 2, 3, last], None) for last in (4, 5))
    assert not np.allclose(first[:3], second[:3], atol=1e-5)


def test_nemotron_parse_computes_nothing_without_a_document():
    lm = library("nemotron_parse").LanguageModel(library("nemotron_parse").TextConfig(**DECODER))
    with pytest.raises(ValueError, match="decoder_input_ids"):
        logits(lm, [1, 2, 3], None)


def test_llava_bunny_is_not_built_without_auto_map():
    config = text("llava_bunny", mm_hidden_size=32, vision_config=TOWER)
    with pytest.raises(TypeError, match="auto_map"):
        library("llava_bunny").ModelConfig.from_dict(config)
