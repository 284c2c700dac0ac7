"""Every knob of the engine and of media loading: default, unit and bounds. Unknown keys are refused by name."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MTPConfig(Frozen):
    max_draft_tokens: int = Field(default=3, ge=1, le=8, description="tokens drafted per step and row: always as many")
    max_rows: int = Field(default=4, ge=1, le=1024, description="with more rows in the batch nothing is drafted")


class SchedulerConfig(Frozen):
    policy: Literal["fifo", "shortest_first", "priority"] = Field(default="fifo", description="order of the queue")
    ageing_s: float = Field(
        default=5.0,
        gt=0,
        description="waiting this long counts as 1000 prompt tokens less, or as one step of priority",
    )
    max_stall_s: float = Field(
        default=0.5, gt=0, description="rows that decode wait no longer than this for a chunk of somebody's prompt"
    )


class GrammarConfig(Frozen):
    compile_timeout_s: float = Field(default=5.0, gt=0, description="one grammar, off the device thread")
    max_bytes: int = Field(default=256 * 2**10, ge=1024, description="of a schema, regex or grammar as text")


class EngineConfig(Frozen):
    model: str = Field(
        default="demo", description="'demo' (shipped with Orchard), a local directory, or a hub repository"
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub repository")
    device: Literal["auto", "cpu", "gpu"] = Field(default="auto", description="auto: the GPU if MLX has one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="of the weights; auto: float32 on the CPU, bfloat16 on a GPU"
    )
    max_context_tokens: int | None = Field(
        default=None, ge=16, description="prompt and answer together; default: what the model was trained for"
    )
    max_running: int = Field(default=32, ge=1, le=1024, description="rows in the decode batch")
    max_waiting: int = Field(
        default=256, ge=0, description="requests that may wait for a row; one more is refused (429)"
    )
    prefill_chunk_tokens: int = Field(default=2048, ge=16, description="prompt tokens per step while nothing decodes")
    prefill_chunk_tokens_busy: int = Field(default=256, ge=16, description="prompt tokens per step while rows decode")
    mtp: Literal["auto", "off"] | MTPConfig = Field(
        default="auto",
        description="speculative decoding with the model's MTP head; auto: as many draft tokens as measurably pay",
    )
    mtp_head: str | None = Field(
        default=None, description="directory or hub repository of a split MTP head; default: the checkpoint's own"
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="decode as a compiled graph; auto: on CUDA, where the host is the slower half"
    )
    scheduler: SchedulerConfig = SchedulerConfig()
    grammar: GrammarConfig = GrammarConfig()
    vision_cache_mb: int = Field(default=256, ge=0, description="image features kept for pictures that come back")
    mlx_cache_mb: int = Field(default=2048, ge=0, description="freed buffers that MLX may keep for reuse")
    step_timeout_s: float = Field(
        default=120.0, gt=0, description="a step that takes longer makes the engine unhealthy"
    )
    max_failed_steps: int = Field(default=5, ge=1, description="failed steps in a row before the engine is unhealthy")


class MediaConfig(Frozen):
    max_images: int = Field(default=16, ge=1, description="pictures in one request")
    max_bytes: int = Field(default=20 * 2**20, ge=1024, description="one encoded picture")
    max_pixels: int = Field(default=40_000_000, ge=1024, description="one decoded picture, width times height")
    fetch_timeout_s: float = Field(default=10.0, gt=0, description="one download, redirects included")
    max_redirects: int = Field(default=3, ge=0)
    allowed_private_hosts: tuple[str, ...] = Field(
        default=(), description="host names or addresses that may be fetched although they are not public"
    )
