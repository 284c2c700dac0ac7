"""What travels between the deployments: the canonical chat request and the plan made from it."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pickle import PickleBuffer
from typing import Any, Generic, Literal, Protocol, TypeVar

from deployments.in_flight import InFlight
from engine.protocol import EngineRequest, GrammarSpec

T = TypeVar("T")

Message = dict[str, Any]
"""A canonical message: `role` (system, user, assistant, tool) and `content` (str, list of parts, or None), and what
else the client sent with it (tool_calls, tool_call_id, name, reasoning_content)."""

MEDIA_KINDS = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "video_url": "video",
    "video": "video",
    "input_video": "video",
    "audio_url": "audio",
    "audio": "audio",
    "input_audio": "audio",
    "file": "file",
}
"""Content part type -> kind of media. A part of any other type is text."""


class PackedMessages(Sequence[Message]):
    """Messages as JSON text, for conversations of megabytes. A process that only hands them on copies bytes; one that
    looks at them parses them then."""

    def __init__(self, text: bytes | bytearray):
        self._text = text

    @classmethod
    def of(cls, messages: Sequence[Message]) -> "PackedMessages":
        return cls(json.dumps(list(messages), ensure_ascii=False, separators=(",", ":")).encode())

    @property
    def num_bytes(self) -> int:
        return len(self._text)

    @cached_property
    def _messages(self) -> tuple[Message, ...]:
        return tuple(json.loads(str(self._text, "utf-8")))

    def __getitem__(self, index: Any) -> Any:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __eq__(self, other: object) -> bool:
        return tuple(other) == self._messages if isinstance(other, Sequence) else NotImplemented

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return PackedMessages, (PickleBuffer(self._text) if protocol >= 5 else bytes(self._text),)


class Route(StrEnum):
    TEXT = "text"
    MLLM = "mllm"


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None: no arguments."""
    strict: bool = False
    """Whether every keyword of the schema must be enforced."""
    is_deferred: bool = False
    """Whether the definition is left out in front of the conversation: a message holds it where it is first needed."""

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's form, which chat templates take."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer calls tools."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()
    """The tools that may be called; empty: all of them. `required` with one name is a named tool choice."""


@dataclass(frozen=True)
class Thinking:
    """Whether the model reasons before it answers."""

    mode: Literal["off", "on", "auto"]
    """`on` is refused for a template that cannot think; `auto` is `on` where the template can and `off` elsewhere."""
    budget: int | None = None
    """Most tokens of the thought; then it is closed. None: no limit."""
    effort: str | None = None
    """`low`, `medium` or `high` for templates that have a variable `reasoning_effort`."""
    field: str = "reasoning_effort"
    """The client's field, for errors."""


@dataclass(frozen=True)
class ChatRequest:
    """One request of any dialect after normalization. None means: the model's own default.

    The fields of sampling are those of `SamplingParams`, where their meaning is told; num_choices, grammar, priority,
    tenant and client those of `EngineRequest`. stop_token_ids: besides the model's own. spec_prefill: whether a long
    prompt may be taken in sparsely; None: by the configuration's rules. spec_prefill_keep: at least this part of what
    is not dense in any case is computed.
    """

    request_id: str
    messages: Sequence[Message]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    num_choices: int = 1
    grammar: GrammarSpec | None = None
    priority: int = 0
    tenant: str = ""
    client: str = ""
    spec_prefill: bool | None = None
    spec_prefill_keep: float | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    """Whether one answer may hold several calls."""
    thinking: Thinking | None = None
    """None: the template's default, which is no thought."""
    raw_prompt: str | tuple[int, ...] | None = None
    """A prompt that no template renders, as text or token ids; messages are empty then."""
    prompt_field: str = "prompt"
    """The client's field of raw_prompt, for errors."""
    is_embedding: bool = False
    """Whether the embedding of raw_prompt is asked for, and no token."""
    ignore_eos: bool = False
    """Whether the answer goes on behind the model's own stop tokens."""
    continue_final_message: bool = False
    """Whether the answer continues the final message, which is the assistant's, instead of beginning a turn."""


@dataclass(frozen=True)
class EmbedRequest:
    """Texts whose embeddings are asked for, by one request of a client."""

    request_id: str
    prompts: tuple[str | tuple[int, ...], ...]
    """Each as text or token ids."""
    fields: tuple[str, ...]
    """The client's field of each prompt, for errors."""
    num_parallel: int = 1
    """How many of them may be in the engines at once."""
    num_dimensions: int | None = None
    """How many the client expects a vector to have; another number is an error."""
    client: str = ""
    """See EngineRequest."""
    priority: int = 0
    """See EngineRequest."""


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of an EmbedRequest's prompts, in their order."""

    vectors: tuple[bytes, ...]
    """Each little-endian float32 [hidden], of length 1."""
    num_prompt_tokens: int
    """Tokens of all prompts."""


@dataclass(frozen=True)
class SpecPrefillReport:
    """What became of a prompt that was to be taken in sparsely.

    num_scored: tokens that the draft model read for it. scoring_s: how long the prompt waited for its plan, seconds.
    dense_because: why all of it is computed, for the client; None if it is not.
    """

    num_scored: int
    scoring_s: float
    dense_because: str | None = None


@dataclass(frozen=True)
class Plan:
    """What a planner makes of a ChatRequest; `planner_node` is the id of the node that made it ('' without Ray).

    spec_prefill: None where nobody asked for a sparse prompt and the configuration wants none.
    """

    request: EngineRequest
    route: Route
    planner_node: str = ""
    spec_prefill: SpecPrefillReport | None = None


@dataclass(frozen=True)
class TextLogprobs:
    """`TokenLogprobs` with tokens as the bytes that they stand for; `top` is best first."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """One complete call of a tool in an answer."""

    id: str
    """Unique; `call_` and 24 hex digits."""
    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(frozen=True)
class TextDelta:
    """What all tokens of one choice since its last delta add; `finish_reason` is set on its last one alone.

    text: of the answer itself, without thought and calls. logprobs: if asked for, one per token, also of tokens whose
    text is still held back. num_drafted, num_accepted: see TokenChunk.
    """

    text: str
    num_tokens: int
    finish_reason: str | None = None
    """stop, length or tool_calls."""
    index: int = 0
    logprobs: tuple[TextLogprobs, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    reasoning: str = ""
    """Text of the thought, without its markers."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that these tokens completed. A call that the end of the answer cuts off is never reported."""
    num_reasoning_tokens: int = 0
    stop_sequence: str | None = None
    """The stop string that ended the choice, with its finish reason."""


@dataclass(frozen=True)
class EngineAnswer(Generic[T]):
    """What one engine says, and where it is; `node_id` is '' without Ray."""

    node_id: str
    replica_id: str
    answer: T


@dataclass(frozen=True)
class SilentEngine:
    """A node whose engine was asked and gave no answer. reason: for the operator."""

    node_id: str
    reason: str


class Generation(Protocol):
    """A request that has begun: its prompt is planned and its first token is there. Ends when all choices have.

    num_cached_tokens: those of the prompt that came out of the prefix cache. num_skipped_tokens: those that were never
    computed; spec_prefill tells why, or why there are none. context_limited: whether the room in the model's context,
    and not the client's max_tokens, is what limits the length of the answer.
    """

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_skipped_tokens(self) -> int: ...

    @property
    def spec_prefill(self) -> SpecPrefillReport | None: ...

    @property
    def context_limited(self) -> bool: ...

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    async def aclose(self) -> None:
        """Stops it and frees its row, also in the middle. Harmless when it is over."""
        ...


class Backend(Protocol):
    """What the HTTP faces need of the graph behind them. in_flight: every completion is entered there."""

    model_name: str
    max_context_tokens: int
    """Prompt and answer together."""
    in_flight: InFlight

    async def start(self, request: ChatRequest, route: Route) -> Generation:
        """Plans and dispatches; returns with the first token, so that every error comes before the headers.

        Raises OrchardError.
        """
        ...

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Computes the embeddings of the prompts. The first error ends all of them. Raises OrchardError."""
        ...

    async def count_tokens(self, request: ChatRequest, route: Route) -> int:
        """Counts the tokens of the prompt, rendered with its tools, those of its images among them.

        Raises OrchardError.
        """
        ...

    async def token_ids(self, request: ChatRequest, route: Route) -> list[int]:
        """Returns the prompt as the engine would get it. Raises OrchardError."""
        ...

    async def text_of(self, token_ids: Sequence[int], field: str) -> str:
        """Returns the text that the tokens stand for. Raises InvalidRequest naming the field, Unavailable."""
        ...

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token by itself. Raises InvalidRequest, Unavailable."""
        ...

    async def cancel(self, request_id: str) -> bool:
        """Ends all requests with this id, whichever node took them; False if there is none.

        Raises Unavailable when that cannot be known.
        """
        ...

    async def status(self) -> dict[str, Any]:
        """The body of `/v1/status`."""
        ...

    async def cache_status(self) -> dict[str, Any]:
        """The body of `GET /v1/cache`, see http/cache.py."""
        ...

    async def clear_cache(self) -> dict[str, Any]:
        """Empties the prefix caches of all engines, but for what is pinned; the body of `DELETE /v1/cache`."""
        ...

    async def not_ready(self) -> str | None:
        """Why no request can be served now, or None."""
        ...
