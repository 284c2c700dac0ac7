"""What both planners do: turn a conversation into token ids and fix how its answer is sampled."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deployments.chat import ChatRequest, Message, PackedMessages
from deployments.planning_threads import PlanningThreads
from engine.config import EngineConfig
from engine.processing.checkpoint import context_limit, read_config, refuse_code, resolve_checkpoint, vocab_size
from engine.processing.conversation import DEFAULT_KWARGS
from engine.processing.fingerprint import checkpoint_fingerprint
from engine.processing.prompt_length import PromptLimit
from engine.processing.tokenizer import ChatPrompt, ChatTokenizer, GenerationDefaults
from engine.protocol import (
    ContextLengthExceeded,
    EngineRequest,
    ImagePatches,
    InvalidRequest,
    PromptOrigin,
    SamplingParams,
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

        def work(is_wanted: Callable[[], bool]) -> tuple[ChatPrompt, PromptOrigin]:
            num_more = sum(image_tokens) - len(image_tokens)  # one placeholder of each is in the text
            limit = PromptLimit(self._max_context_tokens, num_more, is_wanted)
            return self._prompt(messages, request.template_kwargs, image_tokens, limit)

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
            grammar=request.grammar,
            priority=request.priority,
            boundaries=prompt.boundaries,
            tenant=request.tenant,
            client=request.client,
            fills_context=request.max_tokens is None,
            origin=origin,
            checkpoint=self._checkpoint,
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
        return tuple(sorted({*self.tokenizer.stop_token_ids, *request.stop_token_ids}))


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
    """What the client asked for, then what the model's authors advise. Without max_tokens the context is the limit.

    Raises ContextLengthExceeded when prompt and answer do not fit, and InvalidRequest, see SamplingParams.
    """
    room = max_context_tokens - num_prompt_tokens
    max_tokens = max(room, 1) if request.max_tokens is None else request.max_tokens
    if max_tokens > room:
        raise ContextLengthExceeded(num_prompt_tokens, max_tokens, max_context_tokens)
    seed = secrets.randbits(64) if request.seed is None else request.seed % 2**64
    chosen: dict[str, Any] = {name: getattr(request, name) for name in AS_ASKED}
    for name in OF_THE_MODEL:
        asked = getattr(request, name)
        chosen[name] = getattr(defaults, name) if asked is None else asked
    return SamplingParams(max_tokens=max_tokens, seed=seed, **chosen)
