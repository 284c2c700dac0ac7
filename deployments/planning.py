"""What both planners do: turn a conversation into token ids and fix how its answer is sampled."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.chat import ChatRequest, Message, PackedMessages, Thinking
from deployments.planning_threads import PlanningThreads
from engine.config import EngineConfig
from engine.processing.answer_constraint import answer_constraint
from engine.processing.checkpoint import context_limit, read_config, refuse_code, resolve_checkpoint, vocab_size
from engine.processing.conversation import DEFAULT_KWARGS
from engine.processing.fingerprint import checkpoint_fingerprint
from engine.processing.prompt_length import PromptLimit
from engine.processing.tokenizer import ChatPrompt, ChatTokenizer, GenerationDefaults
from engine.protocol import (
    ContextLengthExceeded,
    EngineRequest,
    GrammarSpec,
    ImagePatches,
    InvalidRequest,
    PromptOrigin,
    SamplingParams,
    ThoughtSpec,
)

OF_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters of sampling that the checkpoint sets where the request does not."""
AS_ASKED = ("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "logprobs")


class PromptPlanner:
    """Knows the model's tokenizer, template and defaults, not its weights. Raises EngineFailed for a bad checkpoint.

    finds_boundaries: somebody needs to know where a prompt may be cut, besides the prefix cache.
    """

    def __init__(self, config: EngineConfig, finds_boundaries: bool = False):
        self.model_dir = resolve_checkpoint(config.model, config.revision, weights=False)
        refuse_code(self.model_dir)
        config_of_model = read_config(self.model_dir)
        trained_for = context_limit(config_of_model)
        self._vocab_size = vocab_size(config_of_model)
        self._max_context_tokens = min(config.max_context_tokens or trained_for, trained_for)
        self.tokenizer = ChatTokenizer(self.model_dir)
        self._checkpoint = checkpoint_fingerprint(self.model_dir)
        self._finds_boundaries = config.prefix_cache.enabled or finds_boundaries
        self.threads = PlanningThreads()

    async def engine_request(
        self, request: ChatRequest, messages: Sequence[Message], images: tuple[ImagePatches, ...] = ()
    ) -> EngineRequest:
        """Raises InvalidRequest, also for a conversation that the template refuses, and ContextLengthExceeded."""
        image_tokens = [image.num_tokens for image in images]
        form = AnswerForm.of(request, self.tokenizer)

        def work(is_wanted: Callable[[], bool]) -> tuple[ChatPrompt, PromptOrigin]:
            num_more = sum(image_tokens) - len(image_tokens)  # one placeholder of each is in the text
            limit = PromptLimit(self._max_context_tokens, num_more, is_wanted)
            return self._prompt(messages, form.template_kwargs, image_tokens, limit)

        prompt, origin = await self.threads.run(request.client, num_bytes_of(messages), work)
        return EngineRequest(
            request_id=request.request_id,
            token_ids=prompt.token_ids,
            sampling=sampling_params(
                request, self.tokenizer.generation_defaults, len(prompt.token_ids), self._max_context_tokens
            ),
            stop_token_ids=self._stop_token_ids(request),
            images=images,
            num_choices=request.num_choices,
            grammar=form.grammar,
            priority=request.priority,
            boundaries=prompt.boundaries,
            tenant=request.tenant,
            client=request.client,
            fills_context=True,
            origin=origin,
            checkpoint=self._checkpoint,
            thought=form.thought,
        )

    def _prompt(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, Any],
        image_tokens: Sequence[int],
        limit: PromptLimit,
    ) -> tuple[ChatPrompt, PromptOrigin]:
        how: dict[str, Any] = {"template_kwargs": template_kwargs, "image_tokens": image_tokens, "limit": limit}
        if self._finds_boundaries:
            return self.tokenizer.chat_prompt(messages, **how), prompt_origin(template_kwargs)
        ids = self.tokenizer.encode_chat(messages, **how)
        return ChatPrompt(ids, ()), PromptOrigin()

    def _stop_token_ids(self, request: ChatRequest) -> tuple[int, ...]:
        for i, token_id in enumerate(request.stop_token_ids):
            if token_id >= self._vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids[{i}] is {token_id}; this model's tokens are 0 to {self._vocab_size - 1}",
                    f"stop_token_ids[{i}]",
                )
        own = () if request.ignore_eos else self.tokenizer.stop_token_ids
        return tuple(sorted({*own, *request.stop_token_ids}))


@dataclass(frozen=True)
class AnswerForm:
    """What a request's tools, format and thought mean for its prompt and its answer."""

    template_kwargs: dict[str, Any]
    """Variables of the chat template."""
    grammar: GrammarSpec | None
    """What the answer must match, behind its thought."""
    thought: ThoughtSpec | None
    """What the engine must watch of the thought."""

    @classmethod
    def of(cls, request: ChatRequest, tokenizer: ChatTokenizer) -> "AnswerForm":
        """Raises InvalidRequest for what the model's template has no place for."""
        thinking = request.thinking or Thinking("off")
        is_thinking = thinks(request, tokenizer)
        kwargs = dict(request.template_kwargs)
        if request.thinking is not None:
            kwargs["enable_thinking"] = is_thinking
        if is_thinking and thinking.effort is not None:
            kwargs["reasoning_effort"] = thinking.effort
        if request.tools and tokenizer.tool_format is None:
            raise InvalidRequest("The model's chat template has no place for `tools`.", "tools")
        if shown := [tool.definition for tool in request.tools if not tool.is_deferred]:
            kwargs["tools"] = shown
        grammar, thought = answer_constraint(
            tokenizer,
            tools=[tool.definition for tool in request.tools],
            choice_mode=request.tool_choice.mode,
            choice_names=request.tool_choice.names,
            parallel=request.parallel_tool_calls,
            grammar=request.grammar,
            is_thinking=is_thinking,
            budget=thinking.budget if is_thinking else None,
        )
        return cls(kwargs, grammar, thought)


def thinks(request: ChatRequest, tokenizer: ChatTokenizer) -> bool:
    """Whether the prompt of a request opens a thought. Raises InvalidRequest if it must and the template cannot."""
    thinking = request.thinking
    if thinking is None or thinking.mode == "off":
        return bool(request.template_kwargs.get("enable_thinking")) and tokenizer.reasoning is not None
    if tokenizer.reasoning is None and thinking.mode == "on":
        raise InvalidRequest(
            f"`{thinking.field}` switches thinking on, but this model's chat template cannot think.", thinking.field
        )
    return tokenizer.reasoning is not None


def num_bytes_of(messages: Sequence[Message]) -> int:
    """Roughly, and quickly: what is not packed is small."""
    if isinstance(messages, PackedMessages):
        return messages.num_bytes
    return sum(len(content) for message in messages if isinstance(content := message.get("content"), str))


def prompt_origin(template_kwargs: Mapping[str, Any]) -> PromptOrigin:
    """Digests of what a prompt is rendered with besides its messages, '' for nothing but what is the default.

    Keys inside of a value count in their order: templates write them as they come.
    """
    chosen = {
        name: template_kwargs[name]
        for name in sorted(template_kwargs)
        if name != "tools" and (name, template_kwargs[name]) not in DEFAULT_KWARGS.items()
    }
    return PromptOrigin(tools=_digest(template_kwargs.get("tools")), template_kwargs=_digest(chosen))


def _digest(value: Any) -> str:
    if not value:
        return ""
    text = json.dumps(value, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sampling_params(
    request: ChatRequest, defaults: GenerationDefaults, num_prompt_tokens: int, max_context_tokens: int
) -> SamplingParams:
    """What the client asked for, then what the model's authors advise. max_tokens is a ceiling, as the context is.

    Raises ContextLengthExceeded when the prompt leaves no room, and InvalidRequest, see SamplingParams.
    """
    room = max_context_tokens - num_prompt_tokens
    if room < max(1, request.min_tokens):
        raise ContextLengthExceeded(num_prompt_tokens, max(1, request.min_tokens), max_context_tokens)
    max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
    seed = secrets.randbits(64) if request.seed is None else request.seed % 2**64
    chosen: dict[str, Any] = {name: getattr(request, name) for name in AS_ASKED}
    for name in OF_THE_MODEL:
        asked = getattr(request, name)
        chosen[name] = getattr(defaults, name) if asked is None else asked
    return SamplingParams(max_tokens=max_tokens, seed=seed, **chosen)
