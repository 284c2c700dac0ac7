"""Types that cross between deployments: the canonical chat request, and the plan that is made from it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pickle import PickleBuffer
from typing import Any, Generic, Literal, TypeVar

from deployments.placement.conversation_keys import PromptSketch
from engine.placement import ConversationKeys
from engine.processing.message import Message
from engine.protocol import EngineRequest, GrammarSpec

T = TypeVar("T")


class PackedMessages(Sequence[Message]):
    """Messages as JSON text, parsed on first access.

    A process that only forwards a conversation of megabytes copies bytes instead of pickling objects.
    """

    def __init__(self, text: bytes | bytearray):
        self._text = text

    @classmethod
    def of(cls, messages: Sequence[Message]) -> "PackedMessages":
        """Pack messages as JSON."""
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
    """The planner that prepares a request."""

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
    """Whether a schema keyword that cannot be enforced is an error."""
    is_deferred: bool = False
    """Whether the definition is left out of the prompt's head; a `tool_reference` inserts it into the conversation."""
    input_grammar: GrammarSpec | None = None
    """Regular expression that the only argument, a text, must match as a whole; None: the schema alone counts."""

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's form, which chat templates expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": function}

    @property
    def enforced(self) -> dict[str, Any]:
        """The definition with `input_grammar`, for `answer_constraint`."""
        definition = self.definition
        if self.input_grammar is not None:
            definition["function"]["input_grammar"] = self.input_grammar
        return definition


@dataclass(frozen=True)
class ToolChoice:
    """Whether and which tools the answer calls."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()
    """Tools that may be called; empty: all. `required` with one name is a named tool choice."""


@dataclass(frozen=True)
class Thinking:
    """Whether the model reasons before it answers."""

    mode: Literal["off", "on", "auto"]
    """`on` is an error for a template without thinking; `auto` is `on` if the template supports it, else `off`."""
    budget: int | None = None
    """Most tokens of the thought, which is then closed. None: no limit."""
    effort: str | None = None
    """`low`, `medium` or `high`, for templates with a variable `reasoning_effort`."""
    field: str = "reasoning_effort"
    """The client's field, for errors."""


@dataclass(frozen=True)
class ChatRequest:
    """One request of any dialect after normalization. None means: the model's own default.

    Sampling fields are documented in `SamplingParams`; num_choices, grammar, priority, tenant and client in
    `EngineRequest`.
    """

    request_id: str
    messages: Sequence[Message]
    """Canonical; empty with a raw_prompt."""
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
    """Strings that end an answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens in addition to the model's own."""
    num_choices: int = 1
    grammar: GrammarSpec | None = None
    priority: int = 0
    tenant: str = ""
    client: str = ""
    spec_prefill: bool | None = None
    """Whether to prefill the prompt sparsely. None: the configuration decides."""
    spec_prefill_keep: float | None = None
    """Least fraction of the scored tokens that is computed. None: spec_prefill.keep of the configuration."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    """Whether one answer may hold several calls."""
    thinking: Thinking | None = None
    """None: thinking is off unless the template always thinks."""
    raw_prompt: str | tuple[int, ...] | None = None
    """A prompt that bypasses the chat template, as text or token ids."""
    prompt_field: str = "prompt"
    """The client's field of raw_prompt, for errors."""
    prompt_name: str | None = None
    """Name of the checkpoint's prompt to put in front of an embedding's input; None: the checkpoint's default."""
    scored_query: str | None = None
    """Query whose relevance for raw_prompt, a document, a reranker tells; the result takes the place of the
    embedding."""
    instruction: str | None = None
    """A reranker's instruction; None: the checkpoint's."""
    prompt_logprobs: int | None = None
    """See EngineRequest; with raw_prompt only."""
    ignore_eos: bool = False
    """Whether generation continues past the model's own stop tokens."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, all of which it knows."""
    adds_special_tokens: bool = True
    """Whether a raw prompt gets the tokenizer's own special tokens, such as one at its beginning."""
    continue_final_message: bool = False
    """Whether the answer continues the final message, which must be the assistant's, instead of starting a new turn."""
    sketch: PromptSketch | None = None
    """Keys and size of the prompt for its placement; None if the request was not read from a body."""
    session: str = ""
    """The client's name of its session; '' without one."""
    resume: bool | None = None
    """Whether the answer may go on at another engine if its own is lost. None: the configuration decides."""

    @property
    def keys(self) -> ConversationKeys | None:
        """Keys of the conversation, which only requests of the same tenant share."""
        return None if self.sketch is None else self.sketch.scoped(self.tenant, self.session).keys


@dataclass(frozen=True)
class EmbedRequest:
    """One embedding request: several prompts."""

    request_id: str
    prompts: tuple[str | tuple[int, ...], ...]
    """Each as text or token ids."""
    fields: tuple[str, ...]
    """The client's field of each prompt, for errors."""
    num_parallel: int = 1
    """Choices that the request counts for: prompts that are in the engines at once while these are busy."""
    max_open: int | None = None
    """Most prompts that are in the engines at once while these are idle; None: any number."""
    num_dimensions: int | None = None
    """Length of the vectors that the client asks for. None: the model's own."""
    prompt_name: str | None = None
    """See ChatRequest."""
    client: str = ""
    """See EngineRequest."""
    priority: int = 0
    """See EngineRequest."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of an EmbedRequest's prompts, in their order."""

    vectors: tuple[bytes, ...]
    """Each little-endian float32 [hidden], with an L2 norm of 1."""
    num_prompt_tokens: int
    """Tokens of all prompts."""


@dataclass(frozen=True)
class ScoreRequest:
    """One request for the relevance of documents for queries."""

    request_id: str
    queries: tuple[str, ...]
    """One for all documents, or as many as documents."""
    documents: tuple[str, ...]
    query_fields: tuple[str, ...]
    """The client's field of each query, for errors."""
    document_fields: tuple[str, ...]
    """The client's field of each document, for errors."""
    is_search: bool = True
    """Whether an embedding model puts its own prompts for queries and documents in front of them."""
    has_activation: bool = True
    """Whether a reranker's scores are probabilities; otherwise they are log-odds."""
    instruction: str | None = None
    """See ChatRequest."""
    num_parallel: int = 1
    """Choices that the request counts for: prompts that are in the engines at once while these are busy."""
    max_open: int | None = None
    """Most prompts that are in the engines at once while these are idle; None: any number."""
    client: str = ""
    """See EngineRequest."""
    priority: int = 0
    """See EngineRequest."""

    @property
    def num_prompts(self) -> int:
        """Most prompts that are computed; texts that occur twice are computed once."""
        return len(self.queries) + len(self.documents)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Query and document of each score."""
        queries = self.queries * len(self.documents) if len(self.queries) == 1 else self.queries
        return tuple(zip(queries, self.documents, strict=True))


@dataclass(frozen=True)
class Scores:
    """The scores of a ScoreRequest, one per document in their order."""

    values: tuple[float, ...]
    """Cosines of an embedding model, probabilities or log-odds of a reranker."""
    num_prompt_tokens: int
    """Tokens of all prompts that were computed."""


@dataclass(frozen=True)
class SpecPrefillReport:
    """Outcome of sparse prefill for one prompt."""

    num_scored: int
    """Tokens that the draft model read for this prompt."""
    scoring_s: float
    """Time from the start of planning to the plan, or to the decision to prefill densely."""
    dense_because: str | None = None
    """Reason for a dense prefill, for the client; None if the prefill is sparse."""


@dataclass(frozen=True)
class Plan:
    """A ChatRequest prepared for the engine by a planner."""

    request: EngineRequest
    planner_node: str = ""
    """Ray node id of the planner; '' without Ray."""
    spec_prefill: SpecPrefillReport | None = None
    """None if neither the request nor the configuration asked for a sparse prefill."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the planner by kind of work: `images`, `prompt` (template and tokens), `sparse` (scoring included)."""


@dataclass(frozen=True)
class EngineAnswer(Generic[T]):
    """The answer of one engine to an administrative call."""

    engine_id: str
    """'' without Ray."""
    replica_id: str
    answer: T


@dataclass(frozen=True)
class SilentEngine:
    """An engine that did not answer an administrative call."""

    engine_id: str
    reason: str
    """For the operator."""
