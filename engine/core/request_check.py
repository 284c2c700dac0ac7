"""Validates requests on arrival: rejects those that could never be served as they ask."""

from collections.abc import Iterable

from engine.config import EngineConfig
from engine.core.runner import Encoded, ModelRunner
from engine.core.spec_prefill.plan import why_unfit
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.protocol import MAX_TOP_LOGPROBS, EngineRequest, ThoughtSpec


def check_request(request: EngineRequest, config: EngineConfig, runner: ModelRunner) -> None:
    """Check a request against the model's and the configuration's limits.

    Raises:
        InvalidRequest: A field is out of range, or the model cannot do what the request asks for.
        ContextLengthExceeded: Prompt and output do not fit into the context.
    """
    _check_limits(request, config, runner)
    _check_progress(request, runner.vocab_size)
    _check_plan(request, runner.no_sparse)
    _check_pooling(request, runner.no_pooling)
    _check_encoded(request, runner.encoder)
    _check_prompt_logprobs(request, runner)


def _check_limits(request: EngineRequest, config: EngineConfig, runner: ModelRunner) -> None:
    """Check that every field is in its range, and that prompt and output fit into the context."""
    num_prompt_tokens, sampling = len(request.token_ids), request.sampling
    vocab_size, max_context_tokens = runner.vocab_size, runner.max_context_tokens
    if not num_prompt_tokens:
        raise InvalidRequest("the prompt has 0 tokens; it must have at least 1", "messages")
    ends = int(request.token_ids.min()), int(request.token_ids.max())
    _check_token_ids(ends, runner.num_embeddings, "token", "messages")
    _check_token_ids(request.stop_token_ids, vocab_size, "stop token", "stop_token_ids")
    _check_token_ids(request.scored_tokens or (), vocab_size, "scored token", "scored_tokens")
    for token_id, _ in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"logit_bias: token id {token_id} is not between 0 and {vocab_size - 1}", "logit_bias")
    if request.grammar is not None and sampling.min_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}; it must be 0 with a grammar, whose matches may all be shorter",
            "min_tokens",
        )
    _check_thought(request.thought, vocab_size)
    if not 1 <= request.num_choices <= config.max_running:
        raise InvalidRequest(
            f"n is {request.num_choices}; it must be between 1 and {config.max_running} (max_running)", "n"
        )
    if request.priority and config.scheduler.policy != "priority":
        raise InvalidRequest(
            f"priority is {request.priority}; it must be 0, as scheduler.policy is {config.scheduler.policy} and not "
            "priority",
            "priority",
        )
    if num_prompt_tokens + request.num_output_tokens > max_context_tokens:
        raise ContextLengthExceeded(num_prompt_tokens, request.num_output_tokens, max_context_tokens)


def _check_token_ids(token_ids: Iterable[int], vocab_size: int, kind: str, field: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{kind} id {token_id} is not between 0 and {vocab_size - 1}", field)


def _check_pooling(request: EngineRequest, no_pooling: str | None) -> None:
    """Check that this model can compute the embedding or the score that a request asks for.

    Raises:
        InvalidRequest: The model cannot compute embeddings, or the request has choices, a grammar, images or a plan.
    """
    if request.scored_tokens is not None and request.pooling != "last":
        raise InvalidRequest(f"scored_tokens needs the pooling last; it is {request.pooling}", "scored_tokens")
    if request.pooling is None:
        return
    if no_pooling is not None:
        raise InvalidRequest(f"this model cannot compute embeddings: {no_pooling}", "model")
    asked = {"n": request.num_choices > 1, "grammar": request.grammar, "images": request.images}
    for field, is_asked in {**asked, "sparse": request.sparse}.items():
        if is_asked:
            raise InvalidRequest(
                f"an embedding is computed from one text by dense prefill; {field} must not be set", field
            )


def _check_encoded(request: EngineRequest, encoder: Encoded | None) -> None:
    """Check that an encoder gets texts to embed or pairs to score, whichever it can, and another model neither.

    Raises:
        InvalidRequest: The request asks for something else.
    """
    pair_start, num_tokens = request.pair_start, len(request.token_ids)
    if pair_start is not None and not 0 < pair_start <= num_tokens:
        raise InvalidRequest(f"pair_start is {pair_start}; it must be between 1 and {num_tokens}", "pair_start")
    if encoder is None:
        if request.pooling == "cls" or pair_start is not None:
            raise InvalidRequest(
                "the pooling cls and pair_start need an encoder; this model's first token sees only itself", "pooling"
            )
        return
    if request.pooling is None:
        raise InvalidRequest(f"this model is an encoder: it gives {encoder} and generates no text", "model")
    if request.scored_tokens is not None:
        raise InvalidRequest("this model is an encoder, which has no logits of tokens to compare", "scored_tokens")
    if (encoder == "scores") != (pair_start is not None) or (pair_start is not None and request.pooling != "cls"):
        needs = "pair_start and the pooling cls" if encoder == "scores" else "no pair_start"
        raise InvalidRequest(
            f"this model is an encoder that gives {encoder}, so a request must have {needs}; it has the pooling "
            f"{request.pooling} and pair_start {pair_start}",
            "pair_start",
        )


def _check_prompt_logprobs(request: EngineRequest, runner: ModelRunner) -> None:
    """Check that the logprobs of the prompt can be computed.

    Raises:
        InvalidRequest: The request asks for too many alternatives, or has images, a plan, pooling or a token without a
            logit, or each token of a prompt sees the next one.
    """
    number, vocab_size = request.prompt_logprobs, runner.vocab_size
    if number is None:
        return
    if not 0 <= number <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {number}; it must be between 0 and {MAX_TOP_LOGPROBS}", "prompt_logprobs"
        )
    if runner.whole_prompts is not None:
        raise InvalidRequest(f"the prompts of this model have no logprobs: {runner.whole_prompts}", "prompt_logprobs")
    asked = {"images": request.images, "sparse": request.sparse, "pooling": request.pooling}
    if found := next((field for field, is_asked in asked.items() if is_asked), None):
        raise InvalidRequest(
            f"the logprobs of a prompt are those of a text that is computed as a whole; {found} must not be set", found
        )
    if (token_id := int(request.token_ids.max())) >= vocab_size:
        raise InvalidRequest(
            f"the prompt has the token id {token_id}, which has no logprob; the logits are those of ids up to "
            f"{vocab_size - 1}",
            "prompt_logprobs",
        )


def _check_progress(request: EngineRequest, vocab_size: int) -> None:
    """Check that the answers of another engine can be continued.

    Raises:
        InvalidRequest: They belong to other choices, contain tokens that an answer cannot have, or are complete.
    """
    if not request.progress:
        return
    if request.pooling is not None:
        raise InvalidRequest("an embedding has no tokens to continue; progress must not be set", "progress")
    if len(request.progress) != request.num_choices:
        raise InvalidRequest(
            f"progress has {len(request.progress)} entries; it must have one per choice, {request.num_choices}",
            "progress",
        )
    if not request.open_choices:
        raise InvalidRequest(
            f"all {request.num_choices} choices are finished; at least 1 must be open to be continued", "progress"
        )
    max_tokens = request.sampling.max_tokens
    for index, one in enumerate(request.progress):
        if not one.is_finished and len(one.token_ids) >= max_tokens:
            raise InvalidRequest(
                f"progress[{index}] has {len(one.token_ids)} tokens and is not finished; it must have fewer than "
                f"{max_tokens} (max_tokens)",
                "progress",
            )
        for token_id in one.token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"progress[{index}]: token id {token_id} is not between 0 and {vocab_size - 1}", "progress"
                )
        if stops := set(request.stop_token_ids).intersection(one.token_ids):
            raise InvalidRequest(
                f"progress[{index}] contains stop token {min(stops)}; a stop token ends the choice and must be left "
                "out",
                "progress",
            )


def _check_thought(thought: ThoughtSpec | None, vocab_size: int) -> None:
    if thought is None:
        return
    if thought.budget is not None and thought.budget < 0:
        raise InvalidRequest(f"the thinking budget is {thought.budget}; it must be at least 0", "thought")
    for token_id in (*thought.opening_ids, *thought.closing_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"the thought: token id {token_id} is not between 0 and {vocab_size - 1}", "thought")
    if thought.end_id not in thought.closing_ids:
        raise InvalidRequest(f"the thought ends with token {thought.end_id}, which is not in closing_ids", "thought")


def _check_plan(request: EngineRequest, no_sparse: str | None) -> None:
    """Check that a sparse plan belongs to its prompt and that this model can execute it.

    Raises:
        InvalidRequest: It does not, or the model cannot.
    """
    if request.sparse is None:
        return
    reason = no_sparse or why_unfit(request.sparse, request.token_ids)
    if reason is not None:
        raise InvalidRequest(f"the prefill plan cannot be executed: {reason}", "sparse")
