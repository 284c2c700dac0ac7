"""Patches of the libraries, one file each: the reason, the version, and when it can be removed."""

import mlx.core as mx

from engine.worker import loader
from engine.worker.patches import (
    afm7_reuse,
    attention_cpu,
    embedding_scale,
    gated_delta_chunks,
    gated_delta_cuda,
    gated_delta_next,
    gated_delta_rows,
    gemma2_masks,
    glm_cast,
    internlm_rope,
    limite_rows,
    mistral_scale,
    phi3small_blocks,
    recurrent_gemma_norm,
    row_positions,
    silu_cpu,
)


def install(decodes: bool) -> None:
    """Install the patches for the device in use. May be called several times.

    Args:
        decodes: Whether this process has a decode batch, whose recurrent layers verify drafts.
    """
    correct_families()
    afm7_reuse.install()
    gated_delta_next.install()
    gemma2_masks.install()
    glm_cast.install()
    limite_rows.install()
    mistral_scale.install()
    row_positions.install()
    if not loader.on_gpu():
        if decodes:
            gated_delta_rows.install()
        gated_delta_chunks.install()
        attention_cpu.install()
        silu_cpu.install()
    elif mx.cuda.is_available():
        gated_delta_cuda.install()


def correct_families() -> None:
    """Install the patches of families that the library computes wrongly even for one prompt without a cache."""
    embedding_scale.install()
    internlm_rope.install()
    phi3small_blocks.install()
    recurrent_gemma_norm.install()
