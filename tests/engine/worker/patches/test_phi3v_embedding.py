"""Phi-3-vision's embedding of texts reads no token back, so that it can be compiled."""

from collections.abc import Iterator
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest
from mlx_vlm.models.phi3_v.phi3_v import Model

from engine.worker.patches import families, phi3v_embedding
from tests.support.phi3v_family import CONFIG, small_tower
from tests.support.zoo import new_module

IDS = mx.array([[3, 4, 5], [7, 2, 9]], mx.int32)


@pytest.fixture
def module() -> Iterator[Any]:
    families.correct()
    with small_tower():
        yield new_module(CONFIG)


def test_embeddings_are_those_of_the_library_to_the_bit(module: Any):
    found = module.get_input_embeddings(IDS).inputs_embeds
    assert mx.array_equal(found, phi3v_embedding.library_embeddings(module, IDS).inputs_embeds)


def test_embeddings_may_be_compiled_and_the_patch_is_still_needed(module: Any, monkeypatch: pytest.MonkeyPatch):
    def embed(ids: mx.array) -> mx.array:
        return module.get_input_embeddings(ids).inputs_embeds

    assert mx.array_equal(mx.compile(embed)(IDS), embed(IDS))
    monkeypatch.setattr(Model, "get_input_embeddings", phi3v_embedding.library_embeddings)
    with pytest.raises(ValueError, match="eval an array during function transformations"):
        mx.compile(embed)(IDS)
