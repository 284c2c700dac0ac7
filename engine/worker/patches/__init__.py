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
    gelu,
    gemma2_masks,
    glm_cast,
    glm_rope,
    internlm_rope,
    mimo_window,
    mistral_scale,
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
    """Install the patches of families that the library builds or computes wrongly even for one prompt without a cache.

    Some of them change how a module is built, so that the loader needs them first. May be called several times.
    """
    embedding_scale.install()
    gelu.install()
    glm_cast.install()
    glm_rope.install()
    internlm_rope.install()
    mimo_window.install()
    recurrent_gemma_norm.install()
