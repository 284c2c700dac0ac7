"""PromptOnly: a generation whose prompts are read and whose answers are left out."""

from collections.abc import AsyncIterator

from deployments.http.generation import Generation, TextDelta


class PromptOnly:
    """See http.generation.Generation. The engine computes a prompt together with the first token behind it.

    Args:
        generation: A generation of one token per choice.
    """

    def __init__(self, generation: Generation):
        self.node_ids = generation.node_ids
        self.num_prompt_tokens = generation.num_prompt_tokens
        self.num_cached_tokens = generation.num_cached_tokens
        self.num_skipped_tokens = generation.num_skipped_tokens
        self.context_limited = False
        self.spec_prefill = generation.spec_prefill
        self.left_open = generation.left_open
        self._generation = generation

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        async for delta in self._generation:
            reason = None if delta.finish_reason is None else "length"
            yield TextDelta("", 0, reason, delta.index, prompt_logprobs=delta.prompt_logprobs)

    async def aclose(self) -> None:
        await self._generation.aclose()
