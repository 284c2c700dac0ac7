"""PromptPlanner: turns a ChatRequest into an EngineRequest: token ids, sampling parameters, grammar.

Both planners use it.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deployments.planners.planning_threads import BASE_BYTES, PlanningThreads
from deployments.requests import ChatRequest, Message, PackedMessages, Thinking
from engine.config import EngineConfig
from engine.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, OrchardError
from engine.processing.answer_constraint import answer_constraint
from engine.processing.checkpoint import num_embeddings, read_config, refuse_code, resolve_checkpoint, vocab_size
from engine.processing.context import choose_context
from engine.processing.cross_encoder import CrossEncoder, read_reranker
from engine.processing.encoders import known_code
from engine.processing.fingerprint import checkpoint_fingerprint
from engine.processing.generation_defaults import GenerationDefaults
from engine.processing.image_placeholder import ImagePlaceholder
from engine.processing.pooling import EmbeddingModel, choose_pooling, pools_prompt
from engine.processing.prompt_length import PromptLimit
from engine.processing.prompt_origin import prompt_origin
from engine.processing.reranker import Reranker
from engine.processing.tokenizer import ChatPrompt, ChatTokenizer
from engine.protocol import EngineRequest, GrammarSpec, ImagePatches, PromptOrigin, SamplingParams, ThoughtSpec

OF_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters for which the checkpoint's defaults replace a missing value."""
AS_ASKED = ("presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "logprobs")
"""Sampling parameters that are copied from the request."""


class PromptPlanner:
    """Prepares requests with the model's tokenizer, chat template and generation defaults, without its weights.

    Args:
        config: Engine settings.
        finds_boundaries: Whether to find prompt boundaries even if the prefix cache is off.

    Raises:
        EngineFailed: The checkpoint is unusable.
    """

    def __init__(self, config: EngineConfig, finds_boundaries: bool = False):
        self.model_dir = resolve_checkpoint(config.model, config.revision, weights=False)
        refuse_code(self.model_dir, known_code(self.model_dir))
        config_of_model = read_config(self.model_dir)
        self._vocab_size, self._num_embeddings = vocab_size(config_of_model), num_embeddings(config_of_model)
        self._max_context_tokens = choose_context(config, config_of_model)
        self.tokenizer = ChatTokenizer(self.model_dir)
        self._checkpoint = checkpoint_fingerprint(self.model_dir)
        self._finds_boundaries = config.prefix_cache.enabled or finds_boundaries
        self._max_grammar_bytes = config.grammar.max_bytes
        self._embedding = config.embedding
        self._embedding_model = EmbeddingModel.read(self.model_dir)
        self._reranker = read_reranker(self.model_dir)
        self._check_reranker()
        self.threads = PlanningThreads()

    async def engine_request(
        self, request: ChatRequest, messages: Sequence[Message], images: tuple[ImagePatches, ...] = ()
    ) -> EngineRequest:
        """Render, tokenize and complete a request for the engine.

        Args:
            request: The request.
            messages: Its messages.
            images: Its images, in order of appearance.

        Raises:
            InvalidRequest: A field is invalid, or the chat template refuses the conversation.
            ContextLengthExceeded: The prompt leaves no room for an answer.
        """

        def work(is_wanted: Callable[[], bool]) -> EngineRequest:
            form = AnswerForm.of(request, self.tokenizer, self._max_grammar_bytes)
            prompt = self._prompt(request, messages, self.tokenizer.placeholders(images), form, is_wanted)
            num_tokens, defaults = len(prompt.token_ids), self.tokenizer.generation_defaults
            explains = self._finds_boundaries and request.raw_prompt is None
            return EngineRequest(
                request_id=request.request_id,
                token_ids=prompt.token_ids,
                sampling=sampling_params(request, defaults, num_tokens, self._max_context_tokens),
                stop_token_ids=self._stop_token_ids(request),
                images=images,
                num_choices=request.num_choices,
                grammar=form.grammar,
                priority=request.priority,
                boundaries=prompt.boundaries,
                tenant=request.tenant,
                client=request.client,
                origin=prompt_origin(form.template_kwargs) if explains else PromptOrigin(),
                checkpoint=self._checkpoint,
                thought=form.thought,
                keys=request.keys,
                prompt_logprobs=request.prompt_logprobs,
            )

        num_bytes = num_bytes_of(messages) + num_raw_bytes_of(request.raw_prompt)
        return await self.threads.run(request.client, num_bytes, work)

    async def pooled_requests(self, requests: Sequence[ChatRequest]) -> list[EngineRequest | OrchardError]:
        """Build the requests for the embeddings of raw prompts of one client, or for the scores of those with a query.

        Returns:
            One for each prompt; if one is invalid, those before it, and then its error: InvalidRequest (also if the
            checkpoint's pooling is not supported) or ContextLengthExceeded.
        """

        def work(is_wanted: Callable[[], bool]) -> list[EngineRequest | OrchardError]:
            planned = list[EngineRequest | OrchardError]()
            for request in requests:
                try:
                    planned.append(self._pooled(request, is_wanted))
                except OrchardError as error:
                    return [*planned, error]
            return planned

        num_bytes = sum(num_raw_bytes_of(one.raw_prompt) + num_raw_bytes_of(one.scored_query) for one in requests)
        return await self.threads.run(requests[0].client, num_bytes + BASE_BYTES * (len(requests) - 1), work)

    def _pooled(self, request: ChatRequest, is_wanted: Callable[[], bool]) -> EngineRequest:
        if request.scored_query is not None:
            return self._scored(request, request.scored_query, is_wanted)
        prompt, limits = self._prompted(request), [self._max_context_tokens]
        if self._embedding_model is not None and self._embedding_model.max_tokens is not None:
            limits.append(self._embedding_model.max_tokens)
        try:
            pooling = choose_pooling(self._embedding, self.model_dir)
        except EngineFailed as error:
            raise InvalidRequest(f"This model does not support embeddings: {error}", "model") from None
        limit = PromptLimit(min(limits), is_wanted=is_wanted, num_output_tokens=0)
        return self._pooled_request(request, self._raw_prompt(prompt, limit), pooling=pooling)

    def _scored(self, request: ChatRequest, query: str, is_wanted: Callable[[], bool]) -> EngineRequest:
        reranker, document = self._reranker, request.raw_prompt
        assert reranker is not None and isinstance(document, str)
        limits = [self._max_context_tokens, *([] if reranker.max_tokens is None else [reranker.max_tokens])]
        limit = PromptLimit(min(limits), is_wanted=is_wanted, num_output_tokens=0)
        if isinstance(reranker, CrossEncoder):
            pair = self.tokenizer.encode_pair(query, document, limit)
            return self._pooled_request(request, pair.token_ids, pooling="cls", pair_start=pair.start)
        token_ids = self._pair_prompt(reranker, query, document, request.instruction, limit)
        scored_tokens = reranker.true_token_id, reranker.false_token_id
        return self._pooled_request(request, token_ids, pooling="last", scored_tokens=scored_tokens)

    def _pooled_request(self, request: ChatRequest, token_ids: np.ndarray, **result: Any) -> EngineRequest:
        """Return the request for an embedding or a score. result: the fields that say which."""
        return EngineRequest(
            request_id=request.request_id,
            token_ids=token_ids,
            sampling=SamplingParams(1),
            stop_token_ids=(),
            priority=request.priority,
            client=request.client,
            checkpoint=self._checkpoint,
            **result,
        )

    def _pair_prompt(
        self, reranker: Reranker, query: str, document: str, instruction: str | None, limit: PromptLimit | None = None
    ) -> np.ndarray:
        return self.tokenizer.encode_chat(
            reranker.messages(query, document, instruction),
            template_kwargs=reranker.template_kwargs,
            limit=limit,
            add_generation_prompt=reranker.adds_generation_prompt,
        )

    def _check_reranker(self) -> None:
        """Raise EngineFailed for a reranker whose tokenizer or chat template does not show all parts of a pair."""
        if self._reranker is None:
            return
        if isinstance(self._reranker, CrossEncoder):
            self.tokenizer.encode_pair("query", "document")
            return
        parts = {"query": "Qprobe", "document": "Dprobe", "system": "Iprobe"}
        ids = self._pair_prompt(self._reranker, parts["query"], parts["document"], parts["system"])
        prompt = self.tokenizer.decode(ids.tolist())
        if missing := [role for role, text in parts.items() if text not in prompt]:
            raise EngineFailed(
                f"{self.model_dir}: the chat template of this reranker leaves out messages of the role "
                f"{' and '.join(missing)}; use a checkpoint that was saved by sentence-transformers 5.4 or later"
            )

    async def token_ids(
        self, request: ChatRequest, messages: Sequence[Message], images: tuple[ImagePatches, ...] = ()
    ) -> np.ndarray:
        """Return the prompt's token ids, int32 [num_prompt_tokens]. Raises what `engine_request` raises."""
        return (await self.engine_request(replace(request, max_tokens=None, min_tokens=0), messages, images)).token_ids

    async def count_tokens(
        self, request: ChatRequest, messages: Sequence[Message], images: tuple[ImagePatches, ...] = ()
    ) -> int:
        """Count the prompt's tokens, also of a prompt that exceeds the context.

        Raises:
            ContextLengthExceeded: The prompt is too long and its tokens were not counted to the end.
            InvalidRequest: See `engine_request`.
        """
        try:
            return len(await self.token_ids(request, messages, images))
        except ContextLengthExceeded as error:
            num_prompt_tokens, _, _, is_lower_bound = error.args
            if is_lower_bound:
                raise
            return num_prompt_tokens

    async def text_of(self, token_ids: Sequence[int], field: str) -> str:
        """Decode token ids. Raises InvalidRequest naming the client's field for an id out of range."""

        def work(is_wanted: Callable[[], bool]) -> str:
            self._check_token_ids(token_ids, field)
            return self.tokenizer.decode(token_ids)

        return await self.threads.run("", num_raw_bytes_of(token_ids), work)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each token id by itself; bytes that are no whole character become U+FFFD."""

        def work(is_wanted: Callable[[], bool]) -> list[str]:
            return [self.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]

        return await self.threads.run("", num_raw_bytes_of(token_ids), work)

    def _prompted(self, request: ChatRequest) -> str | tuple[int, ...]:
        """Return the input of an embedding behind the checkpoint's prompt. Token ids are complete as they are.

        Raises:
            InvalidRequest: The prompt is unknown, or cannot be put in front of this input.
        """
        text, name = request.raw_prompt, request.prompt_name
        assert text is not None
        model = self._embedding_model or EmbeddingModel()
        if name is not None and name not in model.prompts:
            known = f"one of {', '.join(sorted(model.prompts))}" if model.prompts else "not set, as this model has none"
            raise InvalidRequest(f"`prompt_name` is {name!r}; it must be {known}.", "prompt_name")
        if name is not None and not isinstance(text, str):
            raise InvalidRequest(f"`prompt_name` is {name!r}, but the input is token ids; send text.", "prompt_name")
        name = name or model.default_prompt
        if not isinstance(text, str):
            return text
        if name is None:
            return text.lower() if model.lowercases else text
        if model.prompts[name] and not pools_prompt(self.model_dir):
            raise InvalidRequest(
                f"The prompt {name!r} is left out of the pooling (include_prompt is false in the checkpoint's "
                "1_Pooling/config.json), which is not supported.",
                "prompt_name",
            )
        prompted = model.prompts[name] + text
        return prompted.lower() if model.lowercases else prompted

    def _raw_prompt(self, prompt: str | tuple[int, ...], limit: PromptLimit, adds_special: bool = True) -> np.ndarray:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode_text(prompt, limit, adds_special)
        else:
            limit.check(len(prompt), is_lower_bound=False)
            self._check_token_ids(prompt, None)
            ids = np.array(prompt, np.int32)
        if not len(ids):
            raise InvalidRequest("The prompt has 0 tokens; it needs at least 1.")
        return ids

    def _check_token_ids(self, token_ids: Sequence[int], field: str | None) -> None:
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._num_embeddings:
                limit = f"this model's token ids are 0 to {self._num_embeddings - 1}"
                raise InvalidRequest(f"The token id at index {i} is {token_id}; {limit}.", field)

    def _prompt(
        self,
        request: ChatRequest,
        messages: Sequence[Message],
        placeholders: Sequence[ImagePlaceholder],
        form: "AnswerForm",
        is_wanted: Callable[[], bool],
    ) -> ChatPrompt:
        """Tokenize the raw prompt, or render and tokenize the messages; with boundaries where they are of use.

        Raises InvalidRequest, ContextLengthExceeded.
        """
        num_more = sum(one.num_repeated for one in placeholders)
        limit = PromptLimit(self._max_context_tokens, num_more, is_wanted)
        if request.raw_prompt is not None:
            return ChatPrompt(self._raw_prompt(request.raw_prompt, limit, request.adds_special_tokens), ())
        how: dict[str, Any] = {
            "template_kwargs": form.template_kwargs,
            "placeholders": placeholders,
            "limit": limit,
            "continue_final_message": request.continue_final_message,
        }
        if self._finds_boundaries:
            return self.tokenizer.chat_prompt(messages, **how)
        return ChatPrompt(self.tokenizer.encode_chat(messages, **how), ())

    def _stop_token_ids(self, request: ChatRequest) -> tuple[int, ...]:
        for i, token_id in enumerate(request.stop_token_ids):
            if token_id >= self._vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids[{i}] is {token_id}; this model's token ids are 0 to {self._vocab_size - 1}",
                    f"stop_token_ids[{i}]",
                )
        own = () if request.ignore_eos else self.tokenizer.stop_token_ids
        return tuple(sorted({*own, *request.stop_token_ids}))


@dataclass(frozen=True)
class AnswerForm:
    """Effects of a request's tools, output format and thinking on its prompt and answer."""

    template_kwargs: dict[str, Any]
    """Variables for the chat template."""
    grammar: GrammarSpec | None
    """Grammar of the answer after its thought; None: free text."""
    thought: ThoughtSpec | None
    """Budget and closing of the thought; None if the engine need not track it."""

    @classmethod
    def of(cls, request: ChatRequest, tokenizer: ChatTokenizer, max_grammar_bytes: int) -> "AnswerForm":
        """Derive the form from a request. Raises InvalidRequest for what the model's chat template cannot express."""
        if request.raw_prompt is not None:
            return cls({}, request.grammar, None)
        thinking = request.thinking or Thinking("off")
        is_thinking = thinks(request, tokenizer)
        kwargs = dict(request.template_kwargs)
        if tokenizer.reasoning is not None:
            kwargs |= tokenizer.reasoning.template_kwargs(is_thinking)
            if is_thinking and thinking.effort is not None and tokenizer.reasoning.takes_effort:
                kwargs["reasoning_effort"] = thinking.effort
        if request.tools and tokenizer.tool_format is None:
            raise InvalidRequest("The model's chat template does not support `tools`.", "tools")
        if shown := [tool.definition for tool in request.tools if not tool.is_deferred]:
            kwargs["tools"] = shown
        grammar, thought = answer_constraint(
            tokenizer,
            tools=[tool.enforced for tool in request.tools],
            choice_mode=request.tool_choice.mode,
            choice_names=request.tool_choice.names,
            parallel=request.parallel_tool_calls,
            grammar=request.grammar,
            is_thinking=is_thinking,
            budget=thinking.budget if is_thinking else None,
            max_bytes=max_grammar_bytes,
        )
        return cls(kwargs, grammar, thought)


def thinks(request: ChatRequest, tokenizer: ChatTokenizer) -> bool:
    """Tell whether the model thinks before its answer. Raises InvalidRequest if the template cannot do as requested."""
    thinking, reasoning = request.thinking, tokenizer.reasoning
    mode = "default" if thinking is None else thinking.mode
    field = "thinking" if thinking is None else thinking.field
    if reasoning is None:
        if mode == "on":
            unable = f"`{field}` enables thinking, but this model's chat template does not support thinking."
            raise InvalidRequest(unable, field)
        return False
    if reasoning.always:
        if mode == "off":
            raise InvalidRequest(f"`{field}` disables thinking, but this model always thinks before it answers.", field)
        return True
    return mode in ("on", "auto")


def num_bytes_of(messages: Sequence[Message]) -> int:
    """Estimate the size of messages quickly: only strings count in messages that are not packed, which are small."""
    if isinstance(messages, PackedMessages):
        return messages.num_bytes
    return sum(len(content) for message in messages if isinstance(content := message.get("content"), str))


def num_raw_bytes_of(prompt: str | Sequence[int] | None) -> int:
    """Estimate the size of a raw prompt quickly."""
    if prompt is None:
        return 0
    return len(prompt) if isinstance(prompt, str) else 4 * len(prompt)


def sampling_params(
    request: ChatRequest, defaults: GenerationDefaults, num_prompt_tokens: int, max_context_tokens: int
) -> SamplingParams:
    """Combine the client's values with the checkpoint's defaults. The context may lower max_tokens.

    Raises:
        ContextLengthExceeded: The prompt leaves no room for an answer.
        InvalidRequest: A value is out of range, see SamplingParams.
    """
    room = max_context_tokens - num_prompt_tokens
    if room < max(1, request.min_tokens):
        raise ContextLengthExceeded(num_prompt_tokens, max(1, request.min_tokens), max_context_tokens)
    max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
    seed = secrets.randbits(64) if request.seed is None else request.seed % 2**64
    chosen: dict[str, Any] = {name: getattr(request, name) for name in AS_ASKED}
    for name in OF_THE_MODEL:
        asked = getattr(request, name)
        chosen[name] = getattr(defaults, name) if asked is None else asked
    return SamplingParams(max_tokens=max_tokens, seed=seed, **chosen)
