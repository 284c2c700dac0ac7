"""Patches of the libraries, one file each: the reason, the version, and when it can be removed."""

import mlx.core as mx

from engine.worker import loader
from engine.worker.patches import (
    attention_cpu,
    embedding_scale,
    gated_delta_chunks,
    gated_delta_cuda,
    gated_delta_next,
    gated_delta_rows,
    gemma2_masks,
    glm_cast,
    hy_v4_index,
    internlm_rope,
    llama4_rows,
    mistral_scale,
    qwen4_rows,
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
    gated_delta_next.install()
    gemma2_masks.install()
    glm_cast.install()
    llama4_rows.install()
    mistral_scale.install()
    qwen4_rows.install()
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
    hy_v4_index.install()
    internlm_rope.install()
    recurrent_gemma_norm.install()
