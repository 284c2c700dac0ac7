"""Each layer has the window of config.json, as transformers resolves it, or the checkpoint is refused."""

import copy
from typing import Any

import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.context import WINDOWS_IGNORED, choose_context, ignored_window, library_config
from engine.processing.reference_config import RECURRENT, declared_reaches, text_section
from engine.worker.patches import families
from engine.worker.windows import check_windows, found_reaches
from tests.support.families import FAMILIES
from tests.support.night import some_at_night
from tests.support.zoo import new_module

UNQUANTIZED = [name for name, family in FAMILIES.items() if family.quantization is None]
GATE = ("llama windowed", "gemma2", "gemma3", "exaone4", "mimo_v2_flash", "qwen2", "qwen3_next", "lfm2", "plamo2")
LONG = 2**20


def built(config: dict[str, Any]) -> Any:
    families.correct()
    return new_module(library_config(EngineConfig(), config)).language_model


def changed(name: str, **fields: Any) -> dict[str, Any]:
    config = copy.deepcopy(FAMILIES[name].config)
    text_section(config).update(fields)
    return config


@pytest.mark.parametrize("name", some_at_night(UNQUANTIZED, GATE, "the gate has one family of each kind of pattern"))
def test_the_windows_of_each_family_are_those_of_its_config(name: str):
    config = FAMILIES[name].config
    check_windows(built(config), config, choose_context(EngineConfig(), config))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
        ("cohere2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("exaone4", {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
        ("qwen3_next", {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}),
        ("qwen3_5", {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}),
        ("recurrent_gemma", {"attention_window_size": 16}),
    ],
)
def test_a_pattern_that_the_module_does_not_read_is_refused_with_both_values(name: str, fields: dict[str, Any]):
    config = changed(name, **fields)
    try:
        check_windows(made := built(config), config, LONG)
    except EngineFailed as error:
        assert "by config.json" in str(error) and " layer " in str(error) and "the answers would be wrong" in str(error)
    else:
        assert found_reaches(made) != found_reaches(built(FAMILIES[name].config)), "it is applied"


def test_a_pattern_that_is_refused_where_it_counts_is_served_within_the_window():
    config = changed("gemma3_text", layer_types=["full_attention"] * 3)
    made = built(config)
    with pytest.raises(
        EngineFailed, match=r"layer 0 attends to all tokens, but in .* gemma3_text it attends to 8 tokens"
    ):
        check_windows(made, config, 9)
    check_windows(made, config, 8)


def test_a_window_that_the_module_ignores_is_refused_beyond_it():
    config = changed("starcoder2", sliding_window=64)
    assert ignored_window(config) == 64
    check_windows(built(config), config, 64)
    with pytest.raises(
        EngineFailed, match=r"layer 0 attends to 64 tokens, but in .* starcoder2 it attends to all tokens"
    ):
        check_windows(built(config), config, 65)


def test_a_window_of_a_family_that_transformers_does_not_know_is_compared_as_well():
    config = changed("internlm2", sliding_window=64, layer_types=["sliding_attention"] * 3)
    with pytest.raises(EngineFailed, match=r"\(sliding_window 64, layer_types .*attends to all tokens"):
        check_windows(built(config), config, LONG)
    off = changed("internlm2", sliding_window=64, use_sliding_window=False, layer_types=["full_attention"] * 3)
    check_windows(built(off), off, LONG)


def test_windows_are_resolved_as_transformers_does():
    def reaches(family: str, **fields: Any) -> Any:
        return declared_reaches({"model_type": family, "num_hidden_layers": 4, **fields})

    assert reaches("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=2) == [None, None, 64, 64]
    assert reaches("qwen2", sliding_window=64, use_sliding_window=False, max_window_layers=2) == [None] * 4
    assert reaches("mistral") == [4096] * 4 and reaches("mistral", sliding_window=None) == [None] * 4
    assert reaches("cohere2", sliding_window=64, sliding_window_pattern=2) == [64, None, 64, None]
    assert reaches("qwen3_next", full_attention_interval=2) == [RECURRENT, None, RECURRENT, None]
    assert reaches("mimo_v2_flash", sliding_window_size=64) == [None, 65, 65, 65], "the token itself is one more"
    assert reaches("llama4_text", attention_chunk_size=64) == [64, 64, 64, None]


def test_chunks_and_scaled_queries_of_llama_4_limit_the_context():
    assert ignored_window({"model_type": "llama4_text", "num_hidden_layers": 4}) == 8191, "floor_scale"
    plain = {"model_type": "llama4_text", "num_hidden_layers": 4, "attn_temperature_tuning": False}
    assert ignored_window(plain) == 8192 and ignored_window(plain | {"attention_chunk_size": 64}) == 64
    assert ignored_window(plain | {"layer_types": ["full_attention"] * 4}) is None
    assert "llama4_text" in WINDOWS_IGNORED


def test_chunks_of_llama4_limit_no_context_and_another_order_of_its_layers_is_refused():
    families.correct()
    config = copy.deepcopy(FAMILIES["llama4"].config)
    assert ignored_window(config) is None
    check_windows(new_module(config).language_model, config, 4096)
    text = config["text_config"]
    text["no_rope_layers"] = [0, *[1] * (text["num_hidden_layers"] - 1)]
    with pytest.raises(EngineFailed, match="layer 0 attends to all tokens, but in the library's module"):
        check_windows(new_module(config).language_model, config, 4096)
