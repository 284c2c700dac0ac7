"""Every knob of the engine and of media loading: default, unit and bounds. Unknown keys are refused by name."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

BoundaryKind = Literal["system", "turn", "prompt"]
SnapshotKind = Literal["system", "turn", "prompt", "answer"]

Pooling = Literal["last", "mean"]
"""How the hidden states of a text become its embedding: that of the last token, or the mean of all."""

MTPExact = Literal["auto", "on", "off"]
"""Whether drafts are verified by the library's exact verifier."""

MIN_KEEP = 0.1
"""Of the tokens of a sparse prompt that may be chosen from."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def changed(self) -> list[str]:
        """The fields whose value is not the default."""
        return [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.get_default()]


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
        default=0.5,
        gt=0,
        description="rows that decode wait about this long at most for a chunk of a prompt or a piece of an image",
    )
    queue_timeout_s: float = Field(
        default=300.0, gt=0, description="a request that waits longer for its rows is refused (503)"
    )
    fairness: Literal["client", "off"] = Field(
        default="client",
        description="client: among clients that wait, who has had the fewest tokens is next, and one that holds more "
        "than its share of the rows makes room",
    )


class MemoryConfig(Frozen):
    """The engine's books of its memory: every row is paid for before it starts."""

    limit_gb: float | None = Field(
        default=None,
        gt=0,
        description="GiB that the engine may use; default: what the GPU recommends or has, 0.8 of the machine's memory "
        "on a CPU",
    )
    headroom_gb: float | None = Field(
        default=None, ge=0, description="GiB of that left free; default: an eighth of it, at most 8"
    )
    reserve_tokens: int = Field(
        default=4096,
        ge=1,
        description="of an answer so many tokens are reserved before it starts, longer ones as they grow",
    )
    min_available_gb: float | None = Field(
        default=None,
        ge=0,
        description="with less of the machine's memory available new requests are turned away (503); default: 7 % of "
        "it; 0: never",
    )


class GrammarConfig(Frozen):
    compile_timeout_s: float = Field(default=5.0, gt=0, description="one grammar, off the device thread")
    max_bytes: int = Field(default=256 * 2**10, ge=1024, description="of a schema, regex or grammar as text")


class PinnedPrompt(Frozen):
    """A system part that is taken in at the start and never evicted. Exactly one of system and system_file."""

    system: str | None = Field(default=None, min_length=1, description="the text of the system message")
    system_file: str | None = Field(default=None, description="a file that holds it, UTF-8")
    tools: tuple[dict[str, Any], ...] = Field(default=(), description="tool definitions that are sent along with it")

    @model_validator(mode="after")
    def _one_source(self) -> "PinnedPrompt":
        if (self.system is None) == (self.system_file is None):
            raise ValueError("a pinned prompt has either system or system_file")
        return self


class DiskCacheConfig(Frozen):
    path: str = Field(description="directory of the snapshots; made if it is not there")
    max_gb: float = Field(default=20.0, gt=0, description="GiB; the least recently used files go first")


class PrefixCacheConfig(Frozen):
    enabled: bool = Field(default=True, description="keep the state behind prefixes of prompts for others")
    max_gb: float | None = Field(
        default=None,
        gt=0,
        description="GiB of memory for snapshots; default: all that no row or prompt needs now",
    )
    boundaries: tuple[BoundaryKind, ...] = Field(
        default=("system", "turn", "prompt"), description="where prompts are cut: see engine.protocol.Boundary"
    )
    min_tokens: int = Field(
        default=16, ge=1, description="a snapshot is taken where it saves at least so many tokens over the one before"
    )
    answers: bool = Field(
        default=True, description="keep the state behind answers, so that a conversation's next turn goes on from there"
    )
    pinned: tuple[PinnedPrompt, ...] = Field(default=(), description="taken in at the start and never evicted")
    disk: DiskCacheConfig | None = Field(default=None, description="snapshots that survive a restart; default: none")

    @model_validator(mode="after")
    def _effective(self) -> "PrefixCacheConfig":
        changed = [name for name in self.changed() if name != "enabled"]
        if not self.enabled and changed:
            raise ValueError(f"prefix_cache.enabled is false: {' and '.join(changed)} would have no effect")
        if not self.boundaries and not self.pinned and changed != ["boundaries"]:
            raise ValueError(
                "prefix_cache.boundaries is empty and nothing is pinned, so that nothing is kept: "
                f"{' and '.join(name for name in changed if name != 'boundaries')} would have no effect"
            )
        return self


class EmbeddingConfig(Frozen):
    pooling: Literal["auto"] | Pooling = Field(
        default="auto",
        description="hidden state of an embedding: of the last token, or the mean of all; auto: what the checkpoint's "
        "sentence-transformers configuration says, last without one",
    )


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
    max_queue: int = Field(default=256, ge=0, description="requests that may wait for a row; one more is refused (429)")
    prefill_chunk_tokens: int = Field(
        default=2048, ge=16, description="at most so many prompt tokens per step while nothing decodes"
    )
    prefill_chunk_tokens_busy: int = Field(
        default=256, ge=16, description="at most so many prompt tokens per step while rows decode"
    )
    mtp: Literal["auto", "off"] | MTPConfig = Field(
        default="auto",
        description="speculative decoding with the model's MTP head; auto: as many draft tokens as measurably pay",
    )
    mtp_head: str | None = Field(
        default=None, description="directory or hub repository of a split MTP head; default: the checkpoint's own"
    )
    mtp_exact: MTPExact = Field(
        default="auto",
        description="verify drafts with kernels that round as those for one token do; auto: on Metal, with one row in "
        "the batch, where it costs nothing; on reads the weights once per row",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="decode as a compiled graph; auto: on CUDA, where the host is the slower half"
    )
    scheduler: SchedulerConfig = SchedulerConfig()
    grammar: GrammarConfig = GrammarConfig()
    prefix_cache: PrefixCacheConfig = PrefixCacheConfig()
    memory: MemoryConfig = MemoryConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    vision_cache_mb: int = Field(default=256, ge=0, description="image features kept for pictures that come back")
    image_memory_mb: int = Field(
        default=1024,
        ge=64,
        description="pixels of the images of all requests that wait or are being answered, in host memory; a request "
        "beyond it is refused (429)",
    )
    mlx_cache_mb: int = Field(default=2048, ge=0, description="freed buffers that MLX may keep for reuse")
    step_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="the engine has failed when a single piece of work (a chunk of a prompt, a decode step, a piece of "
        "an image) takes longer than this and than 20 times its predicted time; twice that the first time in its shape",
    )
    max_failed_steps: int = Field(default=5, ge=1, description="failed steps in a row before the engine is unhealthy")
    share_device: bool = Field(
        default=False,
        description="load the model although another engine of this machine uses the same GPU; false: that is refused",
    )

    @model_validator(mode="after")
    def _effective(self) -> "EngineConfig":
        if self.mtp == "off" and self.mtp_head is not None:
            raise ValueError(f"mtp is off: mtp_head {self.mtp_head!r} would have no effect")
        if self.mtp == "off" and self.mtp_exact != "auto":
            raise ValueError(f"mtp is off: mtp_exact {self.mtp_exact!r} would have no effect")
        if self.model == "demo" and self.revision is not None:
            raise ValueError(f"model demo is part of Orchard: revision {self.revision!r} would have no effect")
        if self.device == "cpu" and self.share_device:
            raise ValueError("device is cpu, which any number of engines may use: share_device would have no effect")
        return self


class SpecPrefillConfig(Frozen):
    """The scorer: a small draft model tells which parts of a long prompt matter, the target computes only those."""

    enabled: bool = Field(default=False, description="score long prompts and take them in sparsely")
    draft_model: str | None = Field(
        default=None,
        min_length=1,
        description="with the tokenizer of the target: 'demo' (the demo model's draft), a directory, a hub repository; "
        "default: demo for the demo model, none for any other, which switches sparse prefill off",
    )
    draft_revision: str | None = Field(default=None, description="branch, tag or commit of a hub repository")
    threshold_tokens: int = Field(
        default=8192, ge=1, description="so many tokens behind what is cached, and requests need not ask for it"
    )
    keep: float = Field(
        default=0.3, ge=MIN_KEEP, le=1.0, description="at least this part of the scored tokens is computed"
    )
    chunk_size: int = Field(
        default=2048, ge=16, description="tokens per forward of the draft; a request is given up between two"
    )
    lookahead: int = Field(default=16, ge=1, le=64, description="tokens of the answer that the draft looks ahead")
    max_tokens_scored: int = Field(default=65536, ge=64, description="longer prompts are taken in densely")
    max_running: int = Field(default=4, ge=1, le=16, description="prompts that are scored in turns, chunk by chunk")
    max_queue: int = Field(default=8, ge=0, le=32, description="prompts that wait for it; one more is dense")
    deadline_s: float = Field(default=30.0, gt=0, description="a prompt that is not scored by then is taken in densely")
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="auto: the CPU beside an engine, else the GPU if MLX has one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="of the draft's weights; auto: float32 on the CPU, bfloat16 on a GPU"
    )
    memory_share: float | None = Field(
        default=None,
        gt=0,
        le=0.9,
        description="part of the device's memory for weights and caches; default: 0.1; on a GPU that an engine uses "
        "as well it must be said",
    )
    mlx_cache_mb: int = Field(default=512, ge=0, description="freed buffers that MLX may keep for reuse")


class MediaConfig(Frozen):
    max_images: int = Field(default=16, ge=1, description="images in one request")
    max_bytes: int = Field(default=20 * 2**20, ge=1024, description="one encoded image")
    max_pixels: int = Field(default=40_000_000, ge=1024, description="one decoded image, width times height")
    max_image_tokens: int | None = Field(
        default=None,
        ge=4,
        description="larger images are reduced to this many tokens; default: what the model's image processor "
        "recommends, but so that four of the largest images fit into one request (60 MiB after resizing)",
    )
    decode_cpu_s: float = Field(
        default=10.0, gt=0, description="CPU seconds for decoding one image; one that needs more is refused (400)"
    )
    decode_memory_mb: int = Field(
        default=1024, ge=64, description="memory for decoding one image; one that needs more is refused (400)"
    )
    decode_budget_mb: int = Field(
        default=256,
        ge=1,
        description="images that are decoded at the same time on a node, at 4 bytes per pixel; others wait",
    )
    fetch_timeout_s: float = Field(default=10.0, gt=0, description="one download, redirects included")
    max_redirects: int = Field(default=3, ge=0)
    allow_http: bool = Field(
        default=True,
        description="fetch http: URLs, too; false: https: alone, which nobody on the way can read or change",
    )
    allowed_private_hosts: tuple[str, ...] = Field(
        default=(), description="host names or addresses that may be fetched although they are not public"
    )
