"""The engine's errors.

OrchardError
├── InvalidRequest            the client's fault: names the field, the value and the limit
│   └── ContextLengthExceeded prompt and output do not fit into the model's context
│       └── MemoryExceeded    prompt and output do not fit into the engine's memory, even with no other request
├── Overloaded                a limit is reached for now, such as a full queue: retry later
│   └── QueueTimeout          waited in the queue for too long: retry later
├── ScoringTooSlow            scoring a prompt would take longer than its sparse plan saves
├── Cancelled                 the request was cancelled
└── EngineFailed              the engine's fault: the model could not be loaded, a step failed
    └── Unavailable           temporary, not the request's fault: the engine is loading, draining, or short of memory
"""


class OrchardError(Exception):
    """Base of all errors raised on purpose. All arguments reach `Exception`, so that pickling keeps them."""

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return self.message


class InvalidRequest(OrchardError):
    """The client's fault. `field` is the path of the field as the client wrote it, such as `messages[2].content`."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message, field)
        self.field = field


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output do not fit into the model's context.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        num_output_tokens: Requested max_tokens.
        limit: Tokens of the context.
        is_lower_bound: Whether counting the prompt stopped early: it has num_prompt_tokens or more.
    """

    def __init__(self, num_prompt_tokens: int, num_output_tokens: int, limit: int, is_lower_bound: bool = False):
        OrchardError.__init__(self, num_prompt_tokens, num_output_tokens, limit, is_lower_bound)
        self.field = "messages"

    @property
    def message(self) -> str:
        prompt, output, limit, is_lower_bound = self.args
        least = "at least " if is_lower_bound else ""
        return (
            f"This model's maximum context length is {limit} tokens, but the request needs {least}{prompt + output}: "
            f"{least}{prompt} in the prompt and {output} for the answer."
        )


class MemoryExceeded(ContextLengthExceeded):
    """Prompt and output do not fit into the engine's memory, even with no other request.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        num_output_tokens: Requested max_tokens.
        max_tokens: Tokens of the longest row that fits.
        num_bytes: Bytes that the request needs.
        max_bytes: Bytes that the engine has for requests.
    """

    def __init__(self, num_prompt_tokens: int, num_output_tokens: int, max_tokens: int, num_bytes: int, max_bytes: int):
        OrchardError.__init__(self, num_prompt_tokens, num_output_tokens, max_tokens, num_bytes, max_bytes)
        self.field = "messages"

    @property
    def message(self) -> str:
        prompt, output, max_tokens, num_bytes, max_bytes = self.args
        return (
            f"The request needs {num_bytes} bytes of memory: {prompt} tokens in the prompt, {output} for the answer. "
            f"This engine has {max_bytes} bytes for requests, enough for one row of {max_tokens} tokens."
        )


class Overloaded(OrchardError):
    """A limit is reached for now; the request may succeed after retry_after_s seconds.

    `limit` is the name of the limit, for the metrics; '' if no option sets it.
    """

    def __init__(self, message: str, retry_after_s: float, limit: str = ""):
        super().__init__(message, retry_after_s, limit)
        self.retry_after_s = retry_after_s
        self.limit = limit


class QueueTimeout(Overloaded):
    """The request waited in the queue for longer than queue_timeout_s seconds."""


class ScoringTooSlow(OrchardError):
    """Scoring the prompt would take longer than the sparse prefill saves."""


class Cancelled(OrchardError):
    """The request was cancelled before its answer was complete."""


class EngineFailed(OrchardError):
    """The engine is at fault, not the request: its configuration, its model, or a step failed."""


class Unavailable(EngineFailed):
    """The engine cannot serve now, through no fault of the request, which may succeed after retry_after_s seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0):
        OrchardError.__init__(self, message, retry_after_s)
        self.retry_after_s = retry_after_s
