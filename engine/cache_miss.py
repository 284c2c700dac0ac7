"""Why a prompt got fewer cached tokens than it could have."""

from dataclasses import dataclass
from typing import Literal

from engine.config import SnapshotKind

CacheMissReason = Literal["cold", "evicted", "cleared", "tenant", "image", "tools", "template_kwargs", "text"]


@dataclass(frozen=True)
class CacheMiss:
    """Why a prompt got fewer cached tokens than it could have."""

    request_id: str
    """Id of the request."""
    reason: CacheMissReason
    """The difference after num_common tokens; `cold` if there is no similar snapshot."""
    num_prompt_tokens: int
    """Tokens of the prompt."""
    num_cached: int = 0
    """Cached tokens that it got."""
    num_common: int = 0
    """Tokens that it shares with the snapshot."""
    boundary: SnapshotKind | None = None
    """Kind of the snapshot that would have served more; None without one."""
    boundary_tokens: int = 0
    """Tokens of that snapshot."""
    prompt_token_ids: tuple[int, ...] = ()
    """For reason `text`: the prompt's next few tokens after num_common."""
    stored_token_ids: tuple[int, ...] = ()
    """For reason `text`: the snapshot's next few tokens after num_common."""
