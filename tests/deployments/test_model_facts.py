"""The facts about a checkpoint that clients are told."""

import json
from pathlib import Path

import pytest

from deployments.model_facts import read_model_facts
from engine.processing.checkpoint import read_config
from engine.processing.tokenizer import ChatTokenizer
from tests.support.demo_model import DEMO


def test_facts_of_the_demo_model():
    facts = read_model_facts(DEMO, read_config(DEMO), ChatTokenizer(DEMO), is_embedding_model=False)
    assert (facts.has_tools, facts.has_thinking, facts.is_embedding_model) == (True, True, False)
    assert facts.num_bytes > 10**6 and len(facts.digest) == 64
    assert facts.sizes["embedding_length"] == 256 and facts.sizes["block_count"] == 8


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "Q4"),
        ({"text_config": {"dtype": "float16"}}, "F16"),
        ({"torch_dtype": "bfloat16"}, "BF16"),
        ({"torch_dtype": "float64"}, ""),
        ({}, ""),
        ({"quantization": None, "text_config": None}, ""),
    ],
)
def test_quantization_and_sizes_come_from_the_configuration(tmp_path: Path, config: dict, quantization: str):
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_model_facts(tmp_path, config, ChatTokenizer(DEMO), is_embedding_model=True)
    assert (facts.quantization, facts.family, facts.num_bytes, facts.sizes) == (quantization, "unknown", 0, {})


@pytest.mark.parametrize(
    "content", [b"", b"torn", (9).to_bytes(8, "little") + b"no JSON {", (2).to_bytes(8, "little") + b"[]"]
)
def test_weights_that_cannot_be_read_are_left_to_the_engine(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    facts = read_model_facts(tmp_path, {}, ChatTokenizer(DEMO), is_embedding_model=False)
    assert (facts.num_parameters, facts.num_bytes) == (0, len(content))
