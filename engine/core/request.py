"""One request while the engine works on it."""

from dataclasses import dataclass, field
from enum import Enum

from engine.protocol import EngineRequest, FinishReason


class RequestState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    spec: EngineRequest
    state: RequestState = RequestState.WAITING
    num_prefilled: int = 0
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.spec.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.token_ids)

    def append(self, token_id: int) -> FinishReason | None:
        """Takes one sampled token; a stop token ends the request and is not kept."""
        if token_id in self.spec.stop_token_ids:
            return FinishReason.STOP
        self.output_token_ids.append(token_id)
        if len(self.output_token_ids) >= self.spec.sampling.max_tokens:
            return FinishReason.LENGTH
        return None
