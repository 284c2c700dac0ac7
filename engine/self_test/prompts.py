"""The prompts of the self-test: chats of the model's own tokenizer, or random tokens for a checkpoint without one."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageDraw

from engine.errors import EngineFailed
from engine.processing.checkpoint import images_unsupported_reason, read_config, vocab_size
from engine.processing.images import ImagePreprocessor
from engine.processing.tokenizer import ChatPrompt, ChatTokenizer
from engine.protocol import Boundary, ImagePatches
from engine.self_test.outcome import NotApplicable

QUESTIONS = (
    "What is 12 + 30?",
    "Tell me a story about a fox.",
    "What is the capital of France?",
    "List three fruits.",
    "Tell me a story.",
    "How many legs does a spider have?",
)
SYSTEM = "You are Kira, a baker from Oakdale. You love bread, and you tell everybody who asks where you live."
TURNS = ("Where do you live?", "What do you love?")
IMAGE_QUESTION = "What is in the image?"
PASSAGE = "The old gate stands behind the mill. The access code of the old gate is 4821. Nobody opens it in winter. "

RANDOM_TOKENS = 24
"""Tokens that stand for a message where there is no tokenizer."""


@dataclass(frozen=True)
class SelfTestMessage:
    """One message of a chat.

    Attributes:
        role: system, user or assistant.
        text: Its text.
        token_ids: The tokens of an answer; None for other messages.
    """

    role: str
    text: str
    token_ids: tuple[int, ...] | None = None


class Prompts(Protocol):
    """Makes prompts for one model."""

    stop_token_ids: tuple[int, ...]

    def chat(self, messages: Sequence[SelfTestMessage], images: Sequence[ImagePatches] = ()) -> ChatPrompt:
        """Return a prompt; the images belong to the first message of the user."""
        ...

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer."""
        ...

    def long(self, num_tokens: int) -> np.ndarray:
        """Return int32 [num_tokens] of a text that repeats itself."""
        ...

    def image(self) -> ImagePatches:
        """Return a blue circle. Raises NotApplicable if the checkpoint has no image processor."""
        ...


def prompts_of(model_dir: Path) -> Prompts:
    """Return the prompts for a checkpoint: chats if it has a tokenizer with a chat template."""
    try:
        return ChatPrompts(model_dir)
    except EngineFailed:
        return RandomPrompts(vocab_size(read_config(model_dir)))


class ChatPrompts:
    """Chats, by the checkpoint's chat template."""

    def __init__(self, model_dir: Path):
        self._model_dir = model_dir
        self._tokenizer = ChatTokenizer(model_dir)
        self.stop_token_ids = self._tokenizer.stop_token_ids

    def chat(self, messages: Sequence[SelfTestMessage], images: Sequence[ImagePatches] = ()) -> ChatPrompt:
        sent: list[dict[str, Any]] = [{"role": one.role, "content": one.text} for one in messages]
        if images:
            asked = next(one for one in sent if one["role"] == "user")
            parts = [{"type": "image"} for _ in images]
            asked["content"] = [*parts, {"type": "text", "text": asked["content"]}]
        placeholders = self._tokenizer.placeholders(images)
        return self._tokenizer.chat_prompt(sent, template_kwargs={}, placeholders=placeholders)

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def long(self, num_tokens: int) -> np.ndarray:
        passage = self._tokenizer.encode_text(PASSAGE)
        return np.resize(passage, num_tokens).astype(np.int32)

    def image(self) -> ImagePatches:
        if (reason := images_unsupported_reason(self._model_dir, read_config(self._model_dir))) is not None:
            raise NotApplicable(f"no images: {reason}")
        picture = Image.new("RGB", (128, 128), "white")
        ImageDraw.Draw(picture).ellipse((32, 32, 96, 96), fill="blue")
        return ImagePreprocessor(self._model_dir).patches(picture)


class RandomPrompts:
    """Random tokens, the same for the same messages."""

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def chat(self, messages: Sequence[SelfTestMessage], images: Sequence[ImagePatches] = ()) -> ChatPrompt:
        assert not images, "a checkpoint without a tokenizer takes no images"
        parts = [self._drawn(one.text, RANDOM_TOKENS) if one.token_ids is None else one.token_ids for one in messages]
        ends = np.cumsum([len(part) for part in parts])
        boundaries = () if len(parts) < 2 else (Boundary("turn", int(ends[-2])),)
        return ChatPrompt(np.concatenate(parts).astype(np.int32), boundaries)

    def text_of(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def long(self, num_tokens: int) -> np.ndarray:
        return np.resize(self._drawn(PASSAGE, RANDOM_TOKENS), num_tokens)

    def image(self) -> ImagePatches:
        raise NotApplicable("the checkpoint has no tokenizer")

    def _drawn(self, text: str, num_tokens: int) -> np.ndarray:
        random = np.random.default_rng(zlib.crc32(text.encode()))
        return random.integers(0, self._vocab_size, num_tokens).astype(np.int32)
