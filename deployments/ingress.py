"""Ingress: the HTTP API in front of the graph, one per node; turns the engine's tokens into text."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.args import AppArgs
from deployments.autoscaling import nodes_offering
from deployments.cached_call import CachedCall
from deployments.draining import on_stop
from deployments.embedding import embed_all, read_embedding
from deployments.engine_client import PLAN_TIMEOUT_S, EngineClient, failure_of
from deployments.engine_stream import EngineStream
from deployments.http.answer_id import tag_in, tag_of_node
from deployments.http.api_keys import KeyIdentity
from deployments.http.app import create_app
from deployments.http.cache import cache_body, cleared_body
from deployments.http.errors import NodeNotFound
from deployments.http.parsed_request import ModelDefaults
from deployments.http.shared_limits import Entry, SharedLimits
from deployments.http_figures import HttpFigures
from deployments.http_proxy import HOOK, is_guarded
from deployments.in_flight import InFlight
from deployments.ingress_peers import IngressPeers
from deployments.metrics.catalog import METRICS
from deployments.metrics.node_figures import IngressFigures
from deployments.metrics.text_format import text_of
from deployments.node_metrics import NodeReplicas
from deployments.planning import thinks
from deployments.population import CODE, own_code
from deployments.process import in_replica, replica_info
from deployments.process import node_id as own_node_id
from deployments.protocol import (
    HAND_OVER_S,
    ChatRequest,
    Embeddings,
    EmbedRequest,
    Route,
    TextDelta,
    TextLogprobs,
    ToolCall,
)
from deployments.ray_internals import by_reference, listen_on_node_address
from deployments.replica_calls import ask_replicas, call_within
from deployments.serve_log import join_serve_log
from deployments.timeline import RequestTimeline, Timelines
from deployments.tracing import Tracing
from engine.placement import TakenOver
from engine.processing.answer_parser import NOTHING, AnswerParser, AnswerRules
from engine.processing.checkpoint import media_kinds, read_config, resolve_checkpoint
from engine.processing.context import choose_context
from engine.processing.fingerprint import checkpoint_fingerprint
from engine.processing.pooling import EmbeddingModel
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import FinishReason, GrammarSpec, InvalidRequest, TokenChunk, Unavailable

log = logging.getLogger("ray.serve")

STATUS_TIMEOUT_S = 5.0
NEAR_TIMEOUT_S = 0.5
"""Longest wait for the nearest engine's answer before all are asked whether they are ready."""
READY_CHECKED_EVERY_S = 1.0

STATUS_SHARED_S = 0.5
"""Status and readiness requests within this time share one call to the replicas."""


class TextGeneration:
    """Turns the chunks of an engine into deltas; implements protocol.Generation.

    A choice ends as soon as a stop string is complete. While other choices run, the engine keeps generating for it, and
    those tokens are dropped; the engine's stream is closed after the last choice.
    """

    def __init__(
        self,
        stream: EngineStream,
        tokenizer: ChatTokenizer,
        rules: AnswerRules,
        note_end: Callable[[], None] = lambda: None,
        is_context_limited: bool = False,
        left_open: tuple[str, ...] = (),
    ):
        request = stream.plan.request
        self.num_prompt_tokens = len(request.token_ids)
        self.node_ids = (stream.node_id,) if stream.node_id else ()
        self.num_cached_tokens = stream.num_cached_tokens
        self.num_skipped_tokens = stream.num_skipped_tokens
        self.spec_prefill = stream.plan.spec_prefill
        self.left_open = left_open
        self.context_limited = is_context_limited
        self._stream = stream
        self._note_end = note_end
        self._token_bytes = tokenizer.token_bytes
        self._running = {index: tokenizer.answer_parser(rules) for index in range(request.num_choices)}

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Yield the deltas of all choices.

        Raises:
            EngineFailed, Unavailable: The engine cannot finish the answer.
            InvalidRequest: The grammar cannot be enforced any further.
            Cancelled: The engine aborted the request.
        """
        try:
            async for chunk in self._stream:
                if (parser := self._running.get(chunk.index)) is None:
                    continue
                if (error := failure_of(chunk, self._stream.plan.request)) is not None:
                    raise error
                delta = self._delta(chunk, parser)
                if delta.finish_reason is not None:
                    del self._running[chunk.index]
                yield delta
                if not self._running:
                    return
        finally:
            await self.aclose()

    def _delta(self, chunk: TokenChunk, parser: AnswerParser) -> TextDelta:
        num_before = parser.num_tokens
        parsed = parser.push(chunk.token_ids)
        num_tokens = parser.num_tokens - num_before  # fewer than in the chunk if a stop string completes in it
        finish_reason = FinishReason.STOP if parser.stopped else chunk.finish_reason
        end = parser.finish() if finish_reason is not None else NOTHING
        calls = parsed.tool_calls + end.tool_calls
        return TextDelta(
            parsed.content + end.content,
            num_tokens,
            _finish_reason(finish_reason, parser),
            chunk.index,
            self._logprobs(chunk, num_tokens) if chunk.logprobs else (),
            chunk.num_drafted,
            chunk.num_accepted,
            parsed.reasoning + end.reasoning,
            tuple(ToolCall(f"call_{secrets.token_hex(12)}", call.name, call.arguments) for call in calls),
            parsed.num_reasoning_tokens,
            parser.stop_sequence if finish_reason is not None else None,
        )

    def _logprobs(self, chunk: TokenChunk, num_tokens: int) -> tuple[TextLogprobs, ...]:
        spell = self._token_bytes
        pairs = zip(chunk.token_ids[:num_tokens], chunk.logprobs[:num_tokens], strict=True)
        return tuple(
            TextLogprobs(spell(token_id), found.logprob, tuple((spell(other), logprob) for other, logprob in found.top))
            for token_id, found in pairs
        )

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._note_end()


@by_reference
@serve.deployment()
@serve.ingress()
class Ingress:
    """Implements protocol.Backend for the HTTP API.

    It admits no more choices than all engines can run and queue, and refuses a request before any work on it. Other
    ingresses admit as many, so an engine may still refuse.
    """

    def __init__(
        self,
        args: AppArgs,
        shown: dict[str, Any],
        engine: DeploymentHandle,
        text: DeploymentHandle,
        mllm: DeploymentHandle,
        scorer: DeploymentHandle | None = None,
    ):
        """Connect to the graph.

        Args:
            args: The arguments of the application, resolved.
            shown: The configuration for `/v1/status`.
            engine: Handle of the engines.
            text: Handle of the planners of text requests.
            mllm: Handle of the planners of requests with images.
            scorer: Handle of the scorers; None without sparse prefill.
        """
        listen_on_node_address()
        join_serve_log()
        config, http = args.engine, args.http
        self.model_name = args.model_name
        self.in_flight = InFlight(
            lambda: max(1, self._client.nodes.num) * (config.max_running + config.max_queue),
            config.max_running,
            max_share_per_address=http.max_share_per_address,
        )
        own = own_deployment()
        self._peers = IngressPeers(own, own_node_id(), "" if own is None else replica_info()["replica_id"])
        self._limits = SharedLimits(self._peers)
        self.figures = HttpFigures()
        self._tracing = Tracing(args.tracing, args.model_name) if args.tracing.endpoint is not None else None
        self.timelines = Timelines(listener=None if self._tracing is None else self._tracing.send)
        self._http = http
        if in_replica() and not is_guarded():
            log.warning("Serve's HTTP proxies run without Orchard's middleware: %s is %r", HOOK, os.environ.get(HOOK))
        self._shown = shown
        model_dir = resolve_checkpoint(config.model, config.revision, weights=False)
        self._tokenizer = ChatTokenizer(model_dir)
        config_of_model = read_config(model_dir)
        self.max_context_tokens = choose_context(config, config_of_model)
        self._media_kinds = media_kinds(model_dir, config_of_model)
        self._is_embedding_model = EmbeddingModel.read(model_dir) is not None
        self._client = EngineClient(
            engine,
            {Route.TEXT: text, Route.MLLM: mllm},
            plan_timeout_s=plan_timeout_s(args),
            checkpoint=checkpoint_fingerprint(model_dir),
        )
        self._drain_timeout_s = args.drain_timeout_s
        self._may_resume = args.resume
        self._replicates = config.prefix_cache.replicate
        self._stopping = on_stop(self.drain)
        self._warming = asyncio.ensure_future(self._client.hand_over.keep_warm(own_node_id())) if in_replica() else None
        self._engines = engine
        self._graph = {"engines": engine, "text": text, "mllm": mllm, "spec_prefill": scorer}
        self._node = NodeReplicas(self.model_name, engine, {"text": text, "media": mllm}, scorer)
        self._ready_until = float("-inf")
        self._has_started = False
        self._status = CachedCall(self._ask_status, STATUS_SHARED_S)
        self._engine_readiness = CachedCall(self._ask_readiness, STATUS_SHARED_S)

    def __serve_build_asgi_app__(self) -> FastAPI:
        late_system, sampling = self._tokenizer.keeps_late_system, self._tokenizer.generation_defaults
        model = ModelDefaults(self._tokenizer.template_variables, sampling.temperature, sampling.top_p)
        return create_app(
            self,
            self._http,
            self._media_kinds,
            late_system,
            is_behind_proxy=in_replica(),
            model=model,
            limits=self._limits,
            tag=tag_of_node(self._peers.node_id),
        )

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what every other ingress knows of this one without asking. Serve calls this once, at the start."""
        return {CODE: own_code()}

    async def start(self, request: ChatRequest, route: Route) -> TextGeneration:
        if self._is_embedding_model:
            raise InvalidRequest(
                f"The model {self.model_name!r} is an embedding model and generates no text. Use POST /v1/embeddings.",
                "model",
            )
        self._status.forget()  # a status right before and right after a request must show exact counters
        try:
            with naming_prompt(request):
                stream = await self._client.start(request, route, self._resumes(request))
        except BaseException:
            self._status.forget()
            raise
        planned = stream.plan.request
        room = planned.sampling.max_tokens
        is_context_limited = request.max_tokens is None or room < request.max_tokens
        rules = answer_rules(request, self._tokenizer)
        note_end = partial(self._answer_ended, request, stream)
        return TextGeneration(
            stream, self._tokenizer, rules, note_end, is_context_limited, left_open(request, planned.grammar)
        )

    def _answer_ended(self, request: ChatRequest, stream: EngineStream) -> None:
        self._status.forget()
        if self._replicates and request.keys is not None and stream.node_id:
            self._client.replication.turn_ended(request.keys.conversation, stream.node_id)

    def _resumes(self, request: ChatRequest) -> bool:
        return self._may_resume if request.resume is None else request.resume

    async def embed(self, request: EmbedRequest) -> Embeddings:
        return await embed_all(request, self._embed_one, may_shorten=self._is_embedding_model)

    async def _embed_one(self, request: ChatRequest) -> tuple[bytes, int]:
        with naming_prompt(request):
            return await read_embedding(await self._client.start(request, Route.TEXT))

    async def count_tokens(self, request: ChatRequest, route: Route) -> int:
        with naming_prompt(request):
            return await self._client.ask_planner("count_tokens", route, request)

    async def token_ids(self, request: ChatRequest, route: Route) -> list[int]:
        with naming_prompt(request):
            return await self._client.ask_planner("token_ids", route, request)

    async def text_of(self, token_ids: Sequence[int], field: str) -> str:
        return await self._client.ask_planner("text_of", Route.TEXT, token_ids, field)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return await self._client.ask_planner("token_texts", Route.TEXT, token_ids)

    async def cancel(self, request_id: str) -> bool:
        """Cancel all requests with this id at every ingress. Returns False if there is none.

        Raises:
            Unavailable: An ingress did not answer, and no other one has the request.
        """
        here = self.in_flight.cancel(request_id)
        if True in await self._ask_tagged(request_id, "cancel_here") or (here and tag_in(request_id) is not None):
            return True
        said = await self._peers.ask_all(STATUS_TIMEOUT_S, "cancel_here", request_id)
        if here or True in said:
            return True
        if num_silent := said.count(None):
            raise Unavailable(f"{num_silent} of {len(said)} ingresses that may have the request did not answer.")
        return False

    async def timeline(self, id: str) -> RequestTimeline | None:
        if (found := await self.timeline_here(id)) is not None:
            return found
        said = await self._ask_tagged(id, "timeline_here")
        if not any(said):
            said = await self._peers.ask_all(STATUS_TIMEOUT_S, "timeline_here", id)
        return next((one for one in said if one is not None), None)

    async def _ask_tagged(self, answer_id: str, method: str) -> list[Any]:
        """Ask the other ingress that has given an answer, by its id; [] if the id does not tell or none answers."""
        said = []
        for there in self._peers.others_with_tag_of(answer_id):
            with suppress(Exception):
                said.append(await self._peers.ask(there, STATUS_TIMEOUT_S, method, answer_id))
        return said

    async def timeline_here(self, id: str) -> RequestTimeline | None:
        """Return the timeline of a request at this ingress; what only the engine knows of an aborted one is added."""
        found = self.timelines.find(id)
        if found is not None and not found.rows and found.node_id and found.answer_id:
            for row in await self._client.timelines(found.node_id, found.answer_id):
                found.add_row(row)
        return found

    async def cancel_here(self, request_id: str) -> bool:
        return self.in_flight.cancel(request_id)

    async def enter_limits(self, replica_id: str, id: str, key: KeyIdentity, num_choices: int) -> Entry:
        return self._limits.enter_for(replica_id, id, key, num_choices)

    async def leave_limits(self, replica_id: str, id: str, key: KeyIdentity, num_tokens: int) -> None:
        self._limits.leave_for(replica_id, id, key, num_tokens)

    async def drain(self) -> None:
        """Refuse new requests and wait until the running ones end, at the latest after drain_timeout_s."""
        num_in_flight = self.in_flight.status()["num_in_flight"]
        draining = "draining: %d choices are in flight and get up to %g s to finish"
        log.info(draining, num_in_flight, self._drain_timeout_s)
        await self.in_flight.drain(self._drain_timeout_s)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        log.info("drained")

    async def status_here(self) -> dict[str, Any]:
        return {**replica_info(), **self.in_flight.status()}

    async def status(self) -> dict[str, Any]:
        """Return sums over all engines, every replica of the graph, and the configuration in effect.

        `ingress` lists this replica first; `spec_prefill` lists the scorers, null without sparse prefill. The result is
        at most STATUS_SHARED_S old and never older than the last start or end of a request at this ingress.
        """
        return await self._status.get()

    async def _ask_status(self) -> dict[str, Any]:
        there = {name: handle for name, handle in self._graph.items() if handle is not None}
        ingresses, *said = await asyncio.gather(self._all_ingresses(), *map(status_of_all, there.values()))
        replicas = dict(zip(there, said, strict=True))
        engines = [replica["engine"] for replica in replicas["engines"]]
        return {
            "model": self.model_name,
            "ready": any(engine["state"] == "ready" for engine in engines),
            "num_running": sum(engine["num_running"] for engine in engines),
            "num_waiting": sum(engine["num_waiting"] for engine in engines),
            "spec_prefill": None,
            **replicas,
            "ingress": ingresses,
            "config": self._shown,
        }

    async def _all_ingresses(self) -> list[dict[str, Any]]:
        own = await self.status_here()
        said = [answer for answer in await self._peers.ask_all(STATUS_TIMEOUT_S, "status_here") if answer is not None]
        return [own, *(answer for answer in said if answer["replica_id"] != own["replica_id"])]

    async def metrics(self, shows_names: bool) -> bytes:
        http = self.figures if shows_names else self.figures.without_names()
        now = self.in_flight.status()
        ingress = IngressFigures(http=http, num_in_flight=now["num_in_flight"], is_draining=now["is_draining"])
        return text_of(METRICS, replace(await self._node.figures(), ingress=ingress))

    async def cache_status(self) -> dict[str, Any]:
        answers, missing = await self._client.ask_all("cache_status", await engine_node_ids())
        return cache_body(answers, missing, self._tokenizer.token_bytes)

    async def clear_cache(self) -> dict[str, Any]:
        return cleared_body(*await self._client.ask_all("clear_cache", await engine_node_ids()))

    async def drain_on(self, node_id: str) -> None:
        """Drain this ingress if it is on the node, whose machine is about to leave; the others go on."""
        if own_node_id() == node_id:
            await self.drain()

    async def drain_node(self, node_id: str, deadline_s: float = HAND_OVER_S) -> TakenOver:
        await self._tell_engine(node_id, is_back=False)
        return await self.hand_over(node_id, deadline_s)

    async def undo_drain(self, node_id: str) -> None:
        await self._tell_engine(node_id, is_back=True)

    async def hand_over(self, node_id: str, deadline_s: float) -> TakenOver:
        """Let the other nodes fetch the snapshots of a drained one, see HandOver.leave."""
        return await self._client.hand_over.leave(node_id, deadline_s)

    async def _tell_engine(self, node_id: str, is_back: bool) -> None:
        nodes = await engine_node_ids()
        if node_id not in nodes:
            raise NodeNotFound(node_id)
        if len(nodes) == 1 and not is_back:
            raise Unavailable("The only node with an engine cannot be drained: stop the server instead.")
        silent = await self._client.leave(node_id, is_back)
        self._status.forget()
        if silent is not None:
            raise Unavailable(f"The engine on node {node_id} did not confirm it: {silent.reason}.")

    async def not_ready(self) -> str | None:
        if self.in_flight.is_draining:
            return "The server is shutting down."
        if time.monotonic() < self._ready_until:
            return None
        return await self._engine_readiness.get()

    async def not_started(self) -> str | None:
        """Once images could be served, the loss of their planner makes only requests with images wait or fail."""
        if (reason := await self.not_ready()) is not None or self._has_started:
            return reason
        self._has_started = not self._media_kinds or bool(await status_of_all(self._graph["mllm"]))
        return None if self._has_started else "Images cannot be read yet: their planner is being started."

    async def _ask_readiness(self) -> str | None:
        """Return the reason why no engine is ready; None if one is. The nearest is asked first, as one is enough."""
        if self._client.nodes.num:
            with suppress(Exception):
                near = await call_within(NEAR_TIMEOUT_S, self._engines.options(method_name="status").remote())
                if near["engine"]["state"] == "ready":
                    self._ready_until = time.monotonic() + READY_CHECKED_EVERY_S
                    return None
        reason = None
        asked = await ask_replicas(self._engines, STATUS_TIMEOUT_S, "status")
        try:
            for answered in asyncio.as_completed(asked):  # one ready engine is enough, a silent one delays nothing
                replica = await answered
                if replica is None:
                    continue
                if replica["engine"]["state"] == "ready":
                    self._ready_until = time.monotonic() + READY_CHECKED_EVERY_S
                    return None
                reason = reason or replica["engine"]["error"]
        finally:
            for task in asked:
                task.cancel()
        return reason or "No engine is ready: the model is being loaded."


def plan_timeout_s(args: AppArgs) -> float:
    """Return the longest wait for a plan, which includes the scoring of a long prompt."""
    return PLAN_TIMEOUT_S + (args.spec_prefill.deadline_s if args.spec_prefill.enabled else 0)


@contextmanager
def naming_prompt(request: ChatRequest) -> Iterator[None]:
    """Make errors about a raw prompt name the client's field instead of `messages`, which planner and engine use."""
    try:
        yield
    except InvalidRequest as error:
        if request.raw_prompt is not None and error.field in (None, "messages"):
            error.field = request.prompt_field
        raise


def answer_rules(request: ChatRequest, tokenizer: ChatTokenizer) -> AnswerRules:
    """Return the rules by which the answer to a request is parsed."""
    if request.raw_prompt is not None:
        return AnswerRules(request.stop, is_raw=True)
    may_call = request.tool_choice.mode != "none"
    tools = tuple(tool.definition for tool in request.tools) if may_call else ()
    is_constrained = request.grammar is not None
    return AnswerRules(request.stop, tools, thinks(request, tokenizer), is_constrained=is_constrained)


def left_open(request: ChatRequest, grammar: GrammarSpec | None) -> tuple[str, ...]:
    """Return the names of what a request asks for and the grammar of its answer does not enforce."""
    if grammar is not None:
        return grammar.left_open
    return tuple(f"tools ({tool.name}): format" for tool in request.tools if tool.input_grammar is not None)


def _finish_reason(reason: FinishReason | None, parser: AnswerParser) -> str | None:
    if reason is FinishReason.STOP and parser.has_tool_calls:
        return "tool_calls"
    return reason.value if reason else None


def own_deployment() -> DeploymentHandle | None:
    """Return a handle to this process's own deployment; None outside a replica."""
    if not in_replica():
        return None
    own = serve.get_replica_context()
    handle = serve.get_deployment_handle(own.deployment, own.app_name)
    return handle.options(method_name="status_here")  # connects the handle before the first call


async def engine_node_ids() -> list[str]:
    """Return the nodes that should have an engine, also while it is starting; [''] without Ray."""
    return await asyncio.to_thread(nodes_offering, "mlx") if ray.is_initialized() else [""]


async def status_of_all(handle: DeploymentHandle) -> list[dict[str, Any]]:
    """Return the status of every running replica of a deployment that answers within STATUS_TIMEOUT_S."""
    said = await asyncio.gather(*await ask_replicas(handle, STATUS_TIMEOUT_S, "status"))
    return [answer for answer in said if answer is not None]
