"""The patches of families that the library cannot build, or computes wrongly even for one prompt without a cache."""

from engine.worker.patches import (
    deepseek_ocr_towers,
    deepseek_v4_pools,
    embedding_scale,
    gelu,
    glm5_next_rows,
    glm_cast,
    glm_rope,
    hy_v4_index,
    internlm_rope,
    kimi_k25_tower,
    llama4_gelu,
    mimo_window,
    molmo2_embedding,
    molmo2_tower,
    moonvit_arithmetic,
    moonvit_positions,
    paligemma_layers,
    phi3small_blocks,
    phi3v_embedding,
    phi4_positions,
    recurrent_gemma_norm,
    rope_shapes,
)


def correct() -> None:
    """Install them, before a model is built: some change how. May be called several times."""
    deepseek_ocr_towers.install()
    deepseek_v4_pools.install()
    embedding_scale.install()
    gelu.install()
    glm5_next_rows.install()
    glm_cast.install()
    glm_rope.install()
    hy_v4_index.install()
    internlm_rope.install()
    kimi_k25_tower.install()
    llama4_gelu.install()
    mimo_window.install()
    molmo2_embedding.install()
    molmo2_tower.install()
    moonvit_arithmetic.install()
    moonvit_positions.install()
    paligemma_layers.install()
    phi3small_blocks.install()
    phi3v_embedding.install()
    phi4_positions.install()
    recurrent_gemma_norm.install()
    rope_shapes.install()
