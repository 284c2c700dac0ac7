"""Bench: the loaded model that the checks share, its requests, and the answers that each of them gets alone."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.core.prefix_cache.snapshot_boundaries import LEAST_TOKENS
from engine.core.runner import ModelRunner
from engine.processing.tokenizer import ChatPrompt
from engine.protocol import MAX_TOP_LOGPROBS, EngineRequest, ImagePatches, Progress, SamplingParams, TokenLogprobs
from engine.self_test.agreement import UNIT_ROUNDOFF, Answer, Rounding, size_of_logits, spread
from engine.self_test.core_run import CoreRun
from engine.self_test.outcome import NotApplicable
from engine.self_test.prompts import IMAGE_QUESTION, QUESTIONS, SYSTEM, TURNS, Prompts, SelfTestMessage
from engine.worker import device_facts

DRAFTS = {"max_draft_tokens": 3, "max_rows": 8}
PLAIN: dict[str, Any] = {"mtp": "off", "prompt_lookup": "off", "prefix_cache": {"enabled": False}}
"""Neither drafts nor prefix cache."""
CACHING: dict[str, Any] = {"min_tokens": LEAST_TOKENS}
"""The prefix cache of checks whose prompts are short: on a GPU they would not be worth a snapshot."""

SHORTENED_PRODUCTS = 1e-5
"""With a larger error of float32 products the device shortens their inputs, as to TF32."""
SHORTENED_UNIT = 2.0**-11
CHUNKS = (2048, 16)
"""Tokens per forward of the two prefills that are compared to measure rounding."""


@dataclass(frozen=True)
class Scale:
    """How much is computed.

    Attributes:
        answer_tokens: Most tokens of an answer.
        num_positions: Positions that are computed in several ways to measure rounding.
        long_tokens: Tokens of the long prompt.
        speed_tokens: Decode steps that are timed.
        prefill_tokens: Tokens of the prompt whose prefill is timed.
    """

    answer_tokens: int
    num_positions: int
    long_tokens: int
    speed_tokens: int
    prefill_tokens: int


FULL = Scale(answer_tokens=48, num_positions=24, long_tokens=600, speed_tokens=96, prefill_tokens=1024)
QUICK = Scale(answer_tokens=10, num_positions=4, long_tokens=96, speed_tokens=12, prefill_tokens=128)


class Bench:
    """A loaded model, and requests for it. Belongs to the device thread.

    Args:
        runner: The model.
        config: The configuration that it was loaded with.
        prompts: Prompts for it.
        scale: How much to compute.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, prompts: Prompts, scale: Scale):
        self.runner = runner
        self.config = config
        self.prompts = prompts
        self.scale = scale

    def core_run(self, **changes: Any) -> CoreRun:
        """Return an idle engine over the model. changes: fields of its configuration, PLAIN by default."""
        return CoreRun(changed(self.config, **{**PLAIN, **changes}), self.runner)

    def together(self, requests: Iterable[EngineRequest], **changes: Any) -> dict[str, Answer]:
        """Return the answers of requests that arrive at once. changes: see `core_run`."""
        return self.core_run(**changes).run({0: list(requests)})

    def request(self, name: str, prompt: ChatPrompt, images: tuple[ImagePatches, ...] = ()) -> EngineRequest:
        """Return a greedy request with logprobs."""
        sampling = SamplingParams(self.scale.answer_tokens, temperature=0.0, logprobs=MAX_TOP_LOGPROBS)
        stops = self.prompts.stop_token_ids
        return EngineRequest(name, prompt.token_ids, sampling, stops, images, boundaries=prompt.boundaries)

    @cached_property
    def questions(self) -> tuple[EngineRequest, ...]:
        """Short greedy requests, and one with a long prompt."""
        asked = [SelfTestMessage("user", question) for question in QUESTIONS]
        short = [self.request(f"question {i + 1}", self.prompts.chat([one])) for i, one in enumerate(asked)]
        ids = np.concatenate([self.prompts.long(self.scale.long_tokens), short[0].token_ids])
        return *short, replace(short[0], request_id="long prompt", token_ids=ids, boundaries=())

    @cached_property
    def sampled(self) -> tuple[EngineRequest, ...]:
        """Requests at temperature 0.8, each with a seed of its own."""
        return tuple(
            replace(one, request_id=f"sampled {i + 1}", sampling=replace(one.sampling, temperature=0.8, seed=i + 1))
            for i, one in enumerate(self.questions[:2])
        )

    @cached_property
    def image_request(self) -> EngineRequest:
        """A question about a blue circle. Raises NotApplicable if the model sees no images."""
        image = self.prompts.image()
        return self.request("image", self.prompts.chat([SelfTestMessage("user", IMAGE_QUESTION)], [image]), (image,))

    @cached_property
    def first_turn(self) -> EngineRequest:
        """The first turn of a conversation with a system message."""
        return self.request("first turn", self.prompts.chat(self._turn(0)))

    def second_turn(self, answer: Answer) -> EngineRequest:
        """Return the turn after the first one's answer."""
        said = SelfTestMessage("assistant", self.prompts.text_of(answer.token_ids), answer.token_ids)
        return self.request("second turn", self.prompts.chat([*self._turn(0), said, SelfTestMessage("user", TURNS[1])]))

    def _turn(self, number: int) -> list[SelfTestMessage]:
        return [SelfTestMessage("system", SYSTEM), SelfTestMessage("user", TURNS[number])]

    def require_prefixes(self) -> None:
        """Raise NotApplicable if no prefix of a prompt has a state of its own that could be cached."""
        if (reason := self.runner.whole_prompts) is not None:
            raise NotApplicable(reason)

    def alone(self, *requests: EngineRequest) -> dict[str, Answer]:
        """Return each request's answer with no other request in the engine, computed once."""
        for one in requests:
            if one.request_id not in self._alone:
                self._alone |= self.together([one])
        return {one.request_id: self._alone[one.request_id] for one in requests}

    @cached_property
    def _alone(self) -> dict[str, Answer]:
        return {}

    @cached_property
    def rounding(self) -> Rounding:
        """How much rounding moves logprobs here, measured.

        Each position of an answer is computed by decoding and by prefill in chunks of two sizes: of the same tokens, by
        other kernels.
        """
        dtype = str(self.runner.capabilities["dtype"])
        unit = UNIT_ROUNDOFF[dtype]
        if device_facts.product_error() > SHORTENED_PRODUCTS:
            unit = max(unit, SHORTENED_UNIT)
        story = self.questions[1]
        answer = self.alone(story)[story.request_id]
        num_positions = min(self.scale.num_positions, len(answer.token_ids))
        ways = (self._prefilled(story, answer, num_positions, chunk) for chunk in CHUNKS)
        measured, size = spread(answer.logprobs[:num_positions], *ways), size_of_logits(answer.logprobs)
        return Rounding(dtype, unit, measured, size)

    def _prefilled(
        self, request: EngineRequest, answer: Answer, num_positions: int, chunk: int
    ) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of the first positions of an answer, each after tokens prefilled with the prompt.

        These stay an answer's: in a prompt whose tokens see each other, they would change what comes before them.
        """
        found = []
        for i in range(num_positions):
            sampling = replace(request.sampling, max_tokens=i + 1)
            one = replace(request, progress=(Progress(answer.token_ids[:i]),), sampling=sampling, stop_token_ids=())
            (first,) = self.together([one], prefill_chunk_tokens=chunk).values()
            found += first.logprobs
        return tuple(found)


def changed(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Return a validated configuration with other fields.

    Without drafts no head is named, and with fixed limits the last of several, which is the one that drafts.
    """
    if changes.get("mtp") == "off":
        changes["mtp_head"] = None
    elif "mtp" in changes and len(config.mtp_heads) > 1:
        changes["mtp_head"] = config.mtp_heads[-1]
    return EngineConfig.model_validate(config.model_dump() | changes)
