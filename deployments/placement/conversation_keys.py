"""Computes the keys by which nodes find the cached prefixes of a conversation, from its canonical messages alone.

The keys of a prompt contain those of the prompts before it, as a client sends the earlier messages again unchanged.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from engine.placement import ConversationKeys
from engine.processing.message import Message

MAX_TURN_KEYS = 15
"""Prefixes of a conversation that have a key: the longest ones."""

KEY_BYTES = 8

OPENING_CHARS = 2048
"""Characters, or token ids, of a raw prompt whose key stands for its conversation."""

BYTES_PER_TOKEN = 4.0
"""Assumed bytes of text per token before anything is measured."""

IMAGE_BYTES = 1024
"""Bytes of text that an image or a video counts for in the estimate of a prompt's tokens."""

SESSION_HEADERS = (
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("session-id", "thread-id"),
    ("x-session-affinity",),
    ("x-session-id",),
)
"""Headers in which agents name their session; the first group with a value counts. Claude Code's sub-agents and Codex's
threads have conversations of their own within a session."""

MAX_SESSION_CHARS = 256
"""Characters of a session's name that count."""


@dataclass(frozen=True, slots=True)
class PromptSketch:
    """Keys and size of a prompt, known before it is rendered and tokenized."""

    keys: ConversationKeys
    num_bytes: int
    """Bytes of its text, tools included; an image counts for IMAGE_BYTES."""

    def scoped(self, tenant: str, session: str) -> "PromptSketch":
        """Return the sketch with keys that only requests of the same tenant share.

        Args:
            tenant: Tenant of the request; cached prefixes are shared only within one.
            session: The client's name of its session; two sessions that begin with the same words are two
                conversations. '' without one.
        """
        salt, own = _number(_bytes(tenant)), _number(_bytes(session)) if session else 0
        keys = ConversationKeys(
            self.keys.system ^ salt, self.keys.conversation ^ salt ^ own, tuple(key ^ salt for key in self.keys.turns)
        )
        return replace(self, keys=keys)


def sketch_conversation(messages: Sequence[Message], tools: Iterable[Mapping[str, Any]] = ()) -> PromptSketch:
    """Return the sketch of a conversation of canonical, normalized messages.

    Args:
        messages: The messages.
        tools: Definitions of the tools that the prompt shows.
    """
    state, num_bytes = blake2b(digest_size=KEY_BYTES), 0
    for tool in tools:
        num_bytes += _add(state, tool)
    num_leading = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
    keys: list[int] = []
    system = conversation = _key(state)
    for i, message in enumerate(messages):
        num_bytes += _add(state, _without_media(message)) + IMAGE_BYTES * _add_media(state, message)
        keys.append(_key(state))
        if i < num_leading:
            system = keys[-1]
        if i <= num_leading:
            conversation = keys[-1]
    return PromptSketch(ConversationKeys(system, conversation, tuple(keys[: -MAX_TURN_KEYS - 1 : -1])), num_bytes)


def sketch_raw(prompt: str | Sequence[int]) -> PromptSketch:
    """Return the sketch of a raw prompt, text or token ids. Its opening stands for the conversation."""
    opening, whole = _raw(prompt[:OPENING_CHARS]), _raw(prompt)
    keys = ConversationKeys(_number(b"raw"), _number(opening), (_number(whole),))
    num_bytes = len(whole) if isinstance(prompt, str) else int(BYTES_PER_TOKEN * len(prompt))
    return PromptSketch(keys, num_bytes)


def session_of(headers: Mapping[str, str]) -> str:
    """Return the name of the client's session from its headers; '' if it names none."""
    for names in SESSION_HEADERS:
        if sent := [headers[name][:MAX_SESSION_CHARS] for name in names if headers.get(name)]:
            return "\n".join(sent)
    return ""


def _raw(prompt: str | Sequence[int]) -> bytes:
    if isinstance(prompt, str):
        return _bytes(prompt)
    return np.array(prompt, np.int64).tobytes()


def _add(state: Any, value: Any) -> int:
    """Add a JSON value to the hash; return its bytes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, default=str)
    encoded = _bytes(text)
    state.update(len(encoded).to_bytes(8, "little") + encoded)
    return len(encoded)


def _without_media(message: Message) -> Message:
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if part["type"] == "text"]}


def _add_media(state: Any, message: Message) -> int:
    """Add the URLs of a message's media to the hash; return how many there are."""
    num = 0
    for url in _media(message):
        state.update(_bytes(url))
        num += 1
    return num


def _media(message: Message) -> Iterator[str]:
    content = message["content"]
    for part in content if isinstance(content, list) else ():
        if (source := part.get(part["type"])) is not None and isinstance(source, Mapping):
            yield source["url"]


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # JSON may have half a character


def _key(state: Any) -> int:
    return int.from_bytes(state.copy().digest(), "little")


def _number(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=KEY_BYTES).digest(), "little")
