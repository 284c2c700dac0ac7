"""The names of the limits that requests can exceed, for the metrics."""

from deployments.http.errors import BodyTooLarge, BodyTooSlow
from deployments.http.rate_limits import RateLimited
from engine.errors import ContextLengthExceeded, MemoryExceeded, Overloaded


def limit_of(error: Exception) -> str:
    """Return the name of the limit that a request exceeded; '' for an error of another kind."""
    match error:
        case RateLimited():
            return error.args[1]
        case Overloaded():
            return error.limit or "other"
        case MemoryExceeded():
            return "memory"
        case ContextLengthExceeded():
            return "max_context_tokens"
        case BodyTooLarge():
            return "max_body_bytes"
        case BodyTooSlow():
            return "min_body_bytes_per_s"
    return ""
