"""What both planners do: turn a conversation into token ids and fix how its answer is sampled."""

import asyncio
import secrets
from collections.abc import Sequence

from deployments.chat import ChatRequest, Message
from engine.config import EngineConfig
from engine.processing.checkpoint import context_limit, read_config, refuse_code, resolve_checkpoint
from engine.processing.tokenizer import ChatTokenizer, GenerationDefaults
from engine.protocol import ContextLengthExceeded, EngineRequest, ImagePatches, SamplingParams


class PromptPlanner:
    """Knows the model's tokenizer, template and defaults, not its weights. Raises EngineFailed for a bad checkpoint."""

    def __init__(self, config: EngineConfig):
        self.model_dir = resolve_checkpoint(config.model, config.revision, weights=False)
        refuse_code(self.model_dir)
        trained_for = context_limit(read_config(self.model_dir))
        self._max_context_tokens = min(config.max_context_tokens or trained_for, trained_for)
        self._tokenizer = ChatTokenizer(self.model_dir)

    async def engine_request(
        self, request: ChatRequest, messages: Sequence[Message], images: tuple[ImagePatches, ...] = ()
    ) -> EngineRequest:
        """Raises InvalidRequest for a conversation that the template refuses, ContextLengthExceeded."""
        token_ids = await asyncio.to_thread(
            self._tokenizer.encode_chat,
            messages,
            template_kwargs=request.template_kwargs,
            image_tokens=[image.num_tokens for image in images],
        )
        return EngineRequest(
            request_id=request.request_id,
            token_ids=token_ids,
            sampling=sampling_params(
                request, self._tokenizer.generation_defaults, len(token_ids), self._max_context_tokens
            ),
            stop_token_ids=self._tokenizer.stop_token_ids,
            images=images,
        )


def sampling_params(
    request: ChatRequest, defaults: GenerationDefaults, num_prompt_tokens: int, max_context_tokens: int
) -> SamplingParams:
    """What the client asked for, then what the model's authors advise. Without max_tokens the context is the limit.

    Raises ContextLengthExceeded when prompt and answer do not fit.
    """
    room = max_context_tokens - num_prompt_tokens
    max_tokens = max(room, 1) if request.max_tokens is None else request.max_tokens
    if max_tokens > room:
        raise ContextLengthExceeded(num_prompt_tokens, max_tokens, max_context_tokens)
    seed = secrets.randbits(64) if request.seed is None else request.seed % 2**64
    asked = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    chosen = {name: getattr(defaults, name) if value is None else value for name, value in asked.items()}
    return SamplingParams(max_tokens=max_tokens, seed=seed, **chosen)
