"""The context limit follows from config.json, its rope scaling, and the settings."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.checkpoint import DEMO_MODEL, read_config
from engine.processing.context import choose_context, context_limit, declared_scalings, library_config

QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA_31 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


def chosen(model_config: dict[str, Any], **options: Any) -> int:
    return choose_context(EngineConfig.model_validate(options), model_config)


def test_the_context_limit_is_the_language_models():
    assert context_limit(read_config(DEMO_MODEL)) == 32768
    assert context_limit({"text_config": {"max_position_embeddings": 7}, "max_position_embeddings": 9}) == 7
    assert context_limit({"text_config": {}, "max_position_embeddings": 9}) == 9
    with pytest.raises(EngineFailed, match="'many'; expected a positive integer"):
        context_limit({"max_position_embeddings": "many"})


@pytest.mark.parametrize(
    ("limit", "scaling", "expected"),
    [
        (40960, QWEN_YARN, 131072),  # Qwen3 with the scaling of its model card, which leaves the limit as it was
        (131072, QWEN_YARN, 131072),
        (163840, {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840),  # DeepSeek-V3
        (131072, LLAMA_31, 131072),
        (16384, {"type": "linear", "factor": 4.0}, 16384),
        (131072, {"type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}, 131072),
        (40960, {"type": "yarn", "factor": 4.0}, 40960),
    ],
)
def test_the_checkpoints_own_scaling_decides_on_its_limit(limit, scaling, expected):
    assert context_limit({"max_position_embeddings": limit, "rope_scaling": scaling}) == expected
    assert context_limit({"max_position_embeddings": limit, "rope_parameters": scaling}) == expected


def test_a_context_beyond_the_limit_is_refused_with_the_factor_that_would_allow_it():
    assert chosen({"max_position_embeddings": 100}, max_context_tokens=100) == 100
    with pytest.raises(EngineFailed, match=r"is 300; the model's limit is 100\..* a factor of at least 3"):
        chosen({"max_position_embeddings": 100}, max_context_tokens=300)
    with pytest.raises(EngineFailed, match=r"is 300; the limit with rope_scaling.factor 2 is 200\..* at least 3"):
        chosen({"max_position_embeddings": 100}, max_context_tokens=300, rope_scaling={"type": "yarn", "factor": 2})


def test_a_model_without_a_declared_limit_takes_any_configured_one():
    assert chosen({}) == 32768
    assert chosen({}, max_context_tokens=10**6) == 10**6


def test_the_context_with_a_scaling_is_a_multiple_of_the_original_one():
    scaling = {"type": "yarn", "factor": 2.5}
    assert chosen({"max_position_embeddings": 40960}, rope_scaling=scaling) == 102400
    assert chosen({"max_position_embeddings": 40960}, rope_scaling=scaling, max_context_tokens=50000) == 50000
    original = {**scaling, "original_max_position_embeddings": 32768}
    assert chosen({"max_position_embeddings": 40960}, rope_scaling=original) == 81920
    assert chosen({}, rope_scaling=original) == 81920


@pytest.mark.parametrize(
    ("model_config", "scaling", "reason"),
    [
        ({"rope_scaling": LLAMA_31}, {}, "a scaling of its own, llama3 with the factor 8.0"),
        ({"rope_parameters": QWEN_YARN}, {}, "a scaling of its own, yarn with the factor 4.0"),
        ({}, {}, "no max_position_embeddings; set rope_scaling.original_max_position_embeddings"),
        ({"max_position_embeddings": 99}, {"original_max_position_embeddings": 100}, "is 100; .* trained for 99"),
    ],
)
def test_a_scaling_that_does_not_fit_the_model_is_refused(model_config, scaling, reason):
    with pytest.raises(EngineFailed, match=reason):
        chosen(model_config, rope_scaling={"type": "yarn", "factor": 4, **scaling})


def test_a_scaling_without_a_factor_is_refused():
    with pytest.raises(EngineFailed, match="'linear' has the factor None"):
        declared_scalings({"rope_scaling": {"type": "linear"}})


def test_scalings_for_each_kind_of_layers_are_all_found():
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    assert [one["rope_type"] for one in declared_scalings({"text_config": {"rope_parameters": nested}})] == ["linear"]


def test_the_library_reads_the_scaling_of_the_settings_where_it_looks_for_it():
    options = EngineConfig.model_validate({"rope_scaling": {"type": "yarn", "factor": 4}})
    expected = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    own = {"text_config": {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 5.0}}}
    changed = library_config(options, own)["text_config"]
    assert changed["rope_scaling"] == expected
    assert changed["rope_parameters"] == {"rope_theta": 5.0, **expected}
    assert own == {"text_config": {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 5.0}}}


def test_base_and_scaling_in_the_format_of_transformers_5_are_given_in_the_older_one_too():
    config = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 5e5, **LLAMA_31}}
    changed = library_config(EngineConfig(), config)
    assert changed["rope_theta"] == 5e5 and changed["rope_scaling"].items() >= LLAMA_31.items()


def test_the_share_of_the_rope_is_given_in_the_older_format_too():
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    read = library_config(EngineConfig(), {"model_type": "phi", "rope_parameters": parameters})
    assert read["partial_rotary_factor"] == 0.5 and read["rope_theta"] == 1e4


def test_a_field_that_published_checkpoints_leave_out_has_the_default_of_transformers():
    read = library_config(EngineConfig(), {"model_type": "granitemoehybrid"})
    assert read["time_step_limit"] == [0.0, float("inf")]
    own = {"model_type": "granitemoehybrid", "time_step_limit": [0.01, 1.0]}
    assert library_config(EngineConfig(), own)["time_step_limit"] == [0.01, 1.0]


def test_an_older_config_is_left_as_it_is():
    for config in ({"rope_theta": 5.0, "rope_scaling": QWEN_YARN}, {"rope_theta": 5.0}, read_config(DEMO_MODEL)):
        assert library_config(EngineConfig(), config) == config


def test_the_original_context_of_yarn_is_the_declared_limit_if_it_is_not_given():
    scaling = {"type": "yarn", "factor": 4.0}
    changed = library_config(EngineConfig(), {"max_position_embeddings": 64, "rope_scaling": scaling})
    assert changed["rope_scaling"]["original_max_position_embeddings"] == 64
