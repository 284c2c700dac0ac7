"""All options of sparse prefill: defaults, units and bounds."""

from typing import Literal

from pydantic import Field

from engine.config import Frozen, RopeScaling

MIN_KEEP = 0.1
"""Smallest share of a sparse prompt's scored tokens to keep."""


class SpecPrefillConfig(Frozen):
    """Options of sparse prefill.

    A small draft model scores the tokens of a long prompt, and the target computes only those that are selected by
    score.
    """

    enabled: bool = Field(default=False, description="score long prompts and prefill them sparsely")
    draft_model: str | None = Field(
        default=None,
        min_length=1,
        description="draft model with the target's tokenizer: 'demo' (the demo model's draft), a directory or a hub "
        "repository; null: demo for the demo model; for other models none, which turns sparse prefill off",
    )
    draft_revision: str | None = Field(
        default=None, description="branch, tag or commit of the draft's hub repository; null: its default branch"
    )
    draft_rope_scaling: RopeScaling | None = Field(
        default=None,
        description="engine.rope_scaling of the draft, whose context must hold the prompts that are scored; null: the "
        "draft's own",
    )
    threshold_tokens: int = Field(
        default=8192,
        ge=1,
        description="prompts with at least this many uncached tokens are prefilled sparsely by default",
    )
    keep: float = Field(
        default=0.3, ge=MIN_KEEP, le=1.0, description="smallest share of the scored tokens that is computed"
    )
    chunk_size: int = Field(
        default=2048, ge=16, description="tokens per forward of the draft; requests can be cancelled between two"
    )
    lookahead: int = Field(
        default=16,
        ge=1,
        le=64,
        description="answer tokens that the draft generates to see which parts of the prompt they attend to",
    )
    max_tokens_scored: int = Field(
        default=196608,
        ge=64,
        description="longer prompts, in tokens, are prefilled densely; so are those beyond the draft's context",
    )
    max_running: int = Field(default=4, ge=1, le=16, description="prompts scored concurrently, chunk by chunk")
    max_queue: int = Field(
        default=8, ge=0, le=32, description="most queued prompts; further ones are prefilled densely"
    )
    deadline_s: float = Field(
        default=30.0, gt=0, description="seconds after which a prompt not yet scored is prefilled densely"
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="device of the draft; auto: the CPU on a node with an engine, else the GPU if MLX has one",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="dtype of the draft's weights; auto: float32 on the CPU, bfloat16 on a GPU"
    )
    memory_share: float | None = Field(
        default=None,
        gt=0,
        le=0.9,
        description="share of the device's memory for weights and caches; null: 0.1; required on a GPU that an "
        "engine uses as well",
    )
    mlx_cache_mb: int = Field(default=512, ge=0, description="MiB of freed buffers that MLX may keep for reuse")
