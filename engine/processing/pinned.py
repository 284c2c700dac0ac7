"""Converts the pinned prompts of serve_config.yaml to requests that prefill them."""

from collections.abc import Sequence
from pathlib import Path

from engine.config import PinnedPrompt
from engine.errors import EngineFailed, InvalidRequest
from engine.processing.prompt_origin import prompt_origin
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams


def read_system(prompt: PinnedPrompt) -> str:
    """Return the system message of a pinned prompt. Raises EngineFailed if its file cannot be read."""
    if prompt.system_file is None:
        return prompt.system or ""
    try:
        return Path(prompt.system_file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise EngineFailed(f"prefix_cache.pinned: {prompt.system_file} cannot be read: {error}") from None


def pinned_requests(prompts: Sequence[PinnedPrompt], tokenizer: ChatTokenizer) -> list[EngineRequest]:
    """Return a request per prompt, with its system part and one more token. Raises EngineFailed naming the prompt."""
    requests = []
    for i, prompt in enumerate(prompts):
        messages = [{"role": "system", "content": read_system(prompt)}, {"role": "user", "content": "Hello"}]
        if prompt.tools and tokenizer.tool_format is None:
            raise EngineFailed(f"prefix_cache.pinned[{i}]: the model's chat template does not support tools")
        kwargs = {"tools": list(prompt.tools)} if prompt.tools else {}
        try:
            chat = tokenizer.chat_prompt(messages, template_kwargs=kwargs)
        except InvalidRequest as error:
            raise EngineFailed(f"prefix_cache.pinned[{i}]: {error}") from None
        system = [boundary for boundary in chat.boundaries if boundary.kind == "system"]
        if not system:
            raise EngineFailed(f"prefix_cache.pinned[{i}]: this model's chat template has no system part to pin")
        ids = chat.token_ids[: system[0].num_tokens + 1]
        requests.append(
            EngineRequest(
                f"pinned-{i}",
                ids,
                SamplingParams(1),
                (),
                boundaries=tuple(system),
                pinned=True,
                origin=prompt_origin(kwargs),
            )
        )
    return requests
