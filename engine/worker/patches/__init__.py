"""Patches of the libraries, one file each: the reason, the version, and when it can be removed."""

import mlx.core as mx

from engine.worker import devices
from engine.worker.patches import (
    afm7_reuse,
    attention_cpu,
    convolutions,
    experts_cuda,
    families,
    few_rows_cuda,
    gated_delta_chunks,
    gated_delta_cuda,
    gated_delta_next,
    gated_delta_rows,
    gemma2_masks,
    limite_rows,
    llama4_rows,
    mamba2_rows,
    mistral_scale,
    mrope_sections,
    prompt_attention_cuda,
    quantized_cuda,
    qwen4_rows,
    qwen35_layers_cuda,
    qwen35_moe_cuda,
    row_positions,
    silu_cpu,
)


def install(decodes: bool) -> None:
    """Install the patches for the device in use. May be called several times.

    Args:
        decodes: Whether this process has a decode batch, whose recurrent layers verify drafts.
    """
    families.correct()
    afm7_reuse.install()
    gated_delta_next.install()
    gemma2_masks.install()
    limite_rows.install()
    llama4_rows.install()
    mamba2_rows.install()
    mistral_scale.install()
    mrope_sections.install()
    qwen4_rows.install()
    row_positions.install()
    if not devices.on_gpu() or mx.cuda.is_available():
        convolutions.install()
    if not devices.on_gpu():
        if decodes:
            gated_delta_rows.install()
        gated_delta_chunks.install()
        attention_cpu.install()
        silu_cpu.install()
    elif mx.cuda.is_available():
        few_rows_cuda.install()
        gated_delta_cuda.install()
        quantized_cuda.install()
        experts_cuda.install()
        prompt_attention_cuda.install()
        qwen35_layers_cuda.install()
        qwen35_moe_cuda.install()
