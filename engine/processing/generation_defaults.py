"""GenerationDefaults: the sampling parameters of requests that set none, from generation_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GenerationDefaults:
    """The checkpoint's default sampling parameters; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> "GenerationDefaults":
        """Return the defaults of a generation_config.json; a key that is absent or null has no effect."""

        def given(key: str, default: float) -> float:
            value = generation.get(key)
            return default if value is None else value

        greedy = generation.get("do_sample") is False
        return cls(
            temperature=0.0 if greedy else float(given("temperature", 1.0)),
            top_p=float(given("top_p", 1.0)),
            top_k=max(0, int(given("top_k", 0))),
            min_p=float(given("min_p", 0.0)),
            repetition_penalty=float(given("repetition_penalty", 1.0)),
        )
