"""The patches of families that the library cannot load, or computes wrongly even for one prompt without a cache."""

from engine.worker.patches import embedding_scale, glm_cast, internlm_rope, phi3small_blocks, recurrent_gemma_norm


def correct() -> None:
    """Install them, before a model is built: some change how. May be called several times."""
    embedding_scale.install()
    glm_cast.install()
    internlm_rope.install()
    phi3small_blocks.install()
    recurrent_gemma_norm.install()
