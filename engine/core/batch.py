"""What the scheduler asks of the runner in one step, and what comes back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.core.request import Request

NO_TOKEN = -1
"""Instead of a token id: the model gave no finite logits."""


@dataclass(slots=True)
class SchedulerOutput:
    """`drop` leaves the runner first; then all running rows decode once; then at most one prefill chunk runs."""

    drop: list[str] = field(default_factory=list)
    decode: bool = False
    prefill: Request | None = None
    max_prefill_tokens: int = 0


@dataclass(slots=True)
class PrefillOutput:
    """num_tokens: prompt tokens now in the cache (0 when the step encoded an image instead).

    first_token: sampled from the last prompt position, set when the prompt is complete and the row has joined.
    """

    num_tokens: int
    first_token: int | None = None


class ModelRunner(Protocol):
    """Computes; never decides. All methods run on the device thread; the attributes never change."""

    max_context_tokens: int
    vocab_size: int
    capabilities: dict[str, Any]

    def decode(self) -> Mapping[str, tuple[int, ...]]:
        """One step for every row that has joined: request id -> its new tokens, or NO_TOKEN."""
        ...

    def prefill(self, request: Request, max_tokens: int) -> PrefillOutput:
        """The next at most `max_tokens` prompt tokens. The row joins the decode batch with the last of them."""
        ...

    def drop(self, request_ids: list[str]) -> None:
        """Frees what these requests hold; ids that it does not know are ignored."""
        ...

    def reset(self) -> None:
        """Lets go of all rows, whatever state they are in. Prompts in progress stay."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by what they are for."""
        ...

    def close(self) -> None: ...
