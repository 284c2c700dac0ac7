"""The rope of GLM-4 turns half of a head."""

import engine.worker  # noqa: F401  # before MLX

from engine.worker.patches import glm_rope  # isort: skip
from mlx_vlm.models.glm.config import ModelConfig
from mlx_vlm.models.glm.language import GLMAttention

from tests.support.families import FAMILIES

ARGS = ModelConfig.from_dict(FAMILIES["glm"].config)


def test_half_of_a_head_is_turned():
    glm_rope.install()
    assert GLMAttention(ARGS).rope.dims == ARGS.head_dim // 2


def test_the_patch_is_still_needed():
    made = GLMAttention(ARGS)
    glm_rope._library_init(made, ARGS)
    assert made.rope.dims == ARGS.head_dim
