"""What crosses the engine's door: requests in, token chunks out, status, and the errors.

OrchardError
├── InvalidRequest            the caller's fault: names the field, the value and the limit
│   └── ContextLengthExceeded prompt and output do not fit the model's context
├── Overloaded                the queue is full: try again later
└── EngineFailed              ours: the model could not be loaded, a step failed, the engine is gone
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np


class OrchardError(Exception):
    """Every error that we raise on purpose. All arguments reach `Exception`, so that pickling keeps them."""

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return self.message


class InvalidRequest(OrchardError):
    """`field` is the path of the offending field as the client wrote it, such as `messages[2].content`."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message, field)
        self.field = field


class ContextLengthExceeded(InvalidRequest):
    def __init__(self, num_prompt_tokens: int, num_output_tokens: int, limit: int):
        OrchardError.__init__(self, num_prompt_tokens, num_output_tokens, limit)
        self.field = "messages"

    @property
    def message(self) -> str:
        prompt, output, limit = self.args
        return (
            f"This model's context holds {limit} tokens, but the request needs {prompt + output}: "
            f"{prompt} in the prompt and {output} for the answer."
        )


class Overloaded(OrchardError):
    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class EngineFailed(OrchardError):
    pass


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How one row is sampled. Equal parameters and seed give equal tokens, alone or in a batch.

    temperature 0 is greedy. Filters apply in the order temperature, top_k, top_p, min_p. top_k 0, top_p 1 and
    min_p 0 are off. seed is an unsigned 64-bit integer. Raises InvalidRequest for anything out of range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "max_tokens": (1, 2**31 - 1),
            "temperature": (0, 100),
            "top_p": (0, 1),
            "top_k": (0, 2**31 - 1),
            "min_p": (0, 1),
            "seed": (0, 2**64 - 1),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", name)


@dataclass(frozen=True)
class ImagePatches:
    """One image, resized and cut for the vision tower, not yet normalised.

    patches: uint8 [grid_t * grid_h * grid_w, channels, patch, patch], in the order of the model's processor.
    grid_thw: patches along time, height and width. num_tokens: placeholder tokens that it takes in the prompt.
    content_hash: hex digest over mode, size and pixels of the decoded picture.
    """

    patches: np.ndarray
    grid_thw: tuple[int, int, int]
    num_tokens: int
    content_hash: str


@dataclass(frozen=True)
class EngineRequest:
    """token_ids: int32 [num_prompt_tokens], image placeholders already repeated per image token."""

    request_id: str
    token_ids: np.ndarray
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    images: tuple[ImagePatches, ...] = ()


@dataclass(frozen=True)
class TokenChunk:
    """All tokens of one request since its last chunk. A stop token ends the request and is not among them.

    `finish_reason` is set on the last chunk alone; `error` tells why when it is ERROR.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot for `/v1/status`: gauges are of this moment, counters since the start. Bytes, seconds, tokens."""

    state: str  # loading, ready, failed, stopped
    model: str
    load_progress: float  # 0 to 1, of the bytes of the weights
    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    max_waiting: int = 0
    max_context_tokens: int = 0
    num_steps: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    max_rows_in_a_step: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    capabilities: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
