"""Completions by LiteLLM over both dialects, and the event loop that it needs."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.clients.questions import MODEL

OWN_WARNINGS = [
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore:Items? .* using the `ReadOnly` qualifier:UserWarning"),
]
"""Marks that ignore the warnings about LiteLLM's own models."""


@contextmanager
def main_loop() -> Iterator[None]:
    """Set an event loop, in which LiteLLM leaves tasks, and close its clients at the end.

    Where there is no event loop LiteLLM makes one that stays open.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.run_until_complete(close_clients())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    asyncio.set_event_loop(None)


async def close_clients() -> None:
    """Close the clients that LiteLLM keeps for an hour: dropped while open, they would warn in any later test."""
    import litellm

    cache = litellm.in_memory_llm_clients_cache
    for client in cache.cache_dict.values():
        closing = client.close()
        if closing is not None:  # of an asynchronous client
            await closing
    cache.flush_cache()


def options_of(base_url: str, provider: str) -> dict[str, Any]:
    api_base = base_url if provider == "anthropic" else f"{base_url}/v1"
    return {"model": f"{provider}/{MODEL}", "api_base": api_base, "api_key": "none", "num_retries": 0}


def complete(base_url: str, provider: str, messages: list[Any], streamed: bool = False, **options: Any) -> Any:
    """Return the one choice, whichever way it came."""
    import litellm

    fields = {**options_of(base_url, provider), "max_tokens": 200, "messages": messages, **options}
    answer: Any = litellm.completion(stream=streamed, **fields)
    if streamed:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0]


def thinking_options(provider: str) -> dict[str, Any]:
    """Return the options that ask for a thought."""
    if provider != "anthropic":
        return {"reasoning_effort": "low"}
    return {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_tokens": 2000,
        "allowed_openai_params": ["thinking"],  # it knows models by name alone
    }
