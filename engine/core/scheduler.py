"""Who runs in the next step: the queue, the rows, and one token budget per step. Pure; touches no array."""

from collections import deque
from collections.abc import Mapping

from engine.config import EngineConfig
from engine.core.batch import NO_TOKEN, PrefillOutput, SchedulerOutput
from engine.core.request import Request, RequestState
from engine.core.stats import Stats
from engine.protocol import FinishReason, TokenChunk

Chunks = dict[str, TokenChunk]


class Scheduler:
    """First come, first served. One prompt is prefilled at a time, in chunks between the decode steps."""

    def __init__(self, config: EngineConfig, stats: Stats):
        self._config = config
        self._stats = stats
        self._waiting: deque[Request] = deque()
        self._prefill: Request | None = None
        self._running: dict[str, Request] = {}
        self._drop: list[str] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Rows that hold device memory: decoding, or in prefill."""
        return len(self._running) + (self._prefill is not None)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._drop or self._prefill)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forgets the request wherever it is; its row is freed before the next step. Unknown ids are ignored."""
        request = self._find(request_id)
        if request is not None:
            self._stats.num_aborted += 1
            self._remove(request)

    def schedule(self) -> SchedulerOutput:
        drop, self._drop = self._drop, []
        if self._prefill is None and self._waiting and len(self._running) < self._config.max_running:
            self._prefill = self._waiting.popleft()
            self._prefill.state = RequestState.PREFILL
        busy = bool(self._running)
        return SchedulerOutput(
            drop=drop,
            decode=busy,
            prefill=self._prefill,
            max_prefill_tokens=self._config.prefill_chunk_tokens_busy if busy else self._config.prefill_chunk_tokens,
        )

    def update_decode(self, tokens: Mapping[str, tuple[int, ...]]) -> Chunks:
        self._stats.max_rows_in_a_step = max(self._stats.max_rows_in_a_step, len(tokens))
        return {
            request_id: self._take(request, tokens[request_id])
            for request_id, request in list(self._running.items())
            if request_id in tokens
        }

    def update_prefill(self, request: Request, output: PrefillOutput) -> Chunks:
        request.num_prefilled += output.num_tokens
        self._stats.num_prompt_tokens += output.num_tokens
        if output.first_token is None:
            return {}
        assert request.num_prefilled == request.num_prompt_tokens
        self._prefill = None
        request.state = RequestState.RUNNING
        self._running[request.id] = request
        return {request.id: self._take(request, (output.first_token,))}

    def fail_rows(self, error: str) -> Chunks:
        """Ends every row of the decode batch: a failed step may have touched any of them."""
        return self._fail(list(self._running.values()), error)

    def fail_prefill(self, request: Request, error: str) -> Chunks:
        return self._fail([request], error)

    def _take(self, request: Request, token_ids: tuple[int, ...]) -> TokenChunk:
        before = len(request.output_token_ids)
        reason = None
        for token_id in token_ids:
            reason = FinishReason.ERROR if token_id == NO_TOKEN else request.append(token_id)
            if reason is not None:
                break
        new = tuple(request.output_token_ids[before:])
        self._stats.num_output_tokens += len(new)
        if reason is None:
            return TokenChunk(new)
        self._remove(request)
        if reason is FinishReason.ERROR:
            self._stats.num_failed += 1
            return TokenChunk(new, reason, "the model gave no finite logits")
        self._stats.num_finished += 1
        return TokenChunk(new, reason)

    def _fail(self, requests: list[Request], error: str) -> Chunks:
        self._stats.num_failed += len(requests)
        for request in requests:
            self._remove(request)
        return {r.id: TokenChunk((), FinishReason.ERROR, error) for r in requests}

    def _remove(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        else:
            self._running.pop(request.id, None)
            if self._prefill is request:
                self._prefill = None
            self._drop.append(request.id)
        request.state = RequestState.FINISHED

    def _find(self, request_id: str) -> Request | None:
        if request_id in self._running:
            return self._running[request_id]
        if self._prefill is not None and self._prefill.id == request_id:
            return self._prefill
        return next((r for r in self._waiting if r.id == request_id), None)
