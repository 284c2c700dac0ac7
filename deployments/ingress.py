"""Ingress: the HTTP API in front of the graph, one per node."""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.args import AppArgs
from deployments.autoscaling import engines_by_node
from deployments.calls.ingress_peers import IngressPeers
from deployments.calls.population import CODE, own_code
from deployments.dispatch.embedding import embed_all
from deployments.dispatch.engine_client import PLAN_TIMEOUT_S, EngineClient
from deployments.dispatch.engine_stream import EngineStream
from deployments.dispatch.pair_scorer import PairScorer
from deployments.dispatch.prompt_field import naming_prompt
from deployments.dispatch.text_generation import TextGeneration, answer_rules, left_open
from deployments.draining import on_stop
from deployments.engine_ids import engine_ids, node_of
from deployments.http.answer_id import tag_of_node
from deployments.http.api_keys import KeyIdentity
from deployments.http.app import create_app
from deployments.http.backend import HAND_OVER_S
from deployments.http.cache import cache_body, cleared_body
from deployments.http.dialects import tag_in
from deployments.http.errors import NodeNotFound
from deployments.http.figures import HttpFigures
from deployments.http.in_flight import InFlight
from deployments.http.parsed_request import ModelDefaults
from deployments.http.response_store import StoredResponse
from deployments.http.shared_limits import Entry, SharedLimits
from deployments.http.shared_responses import RunningResponse, SharedResponses
from deployments.http.timeline import RequestTimeline, Timelines
from deployments.http_proxy import HOOK, is_guarded
from deployments.metrics.catalog import METRICS
from deployments.metrics.node_figures import IngressFigures
from deployments.metrics.text_format import text_of
from deployments.model_facts import read_model_facts
from deployments.process import in_replica, replica_info
from deployments.process import node_id as own_node_id
from deployments.ray_internals import by_reference, listen_on_node_address
from deployments.requests import ChatRequest, Embeddings, EmbedRequest, Route, ScoreRequest, Scores, SilentEngine
from deployments.serve_log import join_serve_log
from deployments.status.graph_status import STATUS_TIMEOUT_S, GraphStatus
from deployments.status.node_replicas import NodeReplicas
from deployments.tracing import Tracing
from engine.errors import InvalidRequest, Unavailable
from engine.placement import TakenOver
from engine.processing.checkpoint import media_kinds, read_config, resolve_checkpoint
from engine.processing.context import choose_context
from engine.processing.cross_encoder import read_reranker
from engine.processing.fingerprint import checkpoint_fingerprint
from engine.processing.pooling import EmbeddingModel
from engine.processing.tokenizer import ChatTokenizer

log = logging.getLogger("ray.serve")


@by_reference
@serve.deployment()
@serve.ingress()
class Ingress:
    """Implements http.backend.Backend for the HTTP API.

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
        num_without_resources: int = 1,
    ):
        """Connect to the graph.

        Args:
            args: The arguments of the application, resolved.
            shown: The configuration for `/v1/status`.
            engine: Handle of the engines.
            text: Handle of the planners of text requests.
            mllm: Handle of the planners of requests with images.
            scorer: Handle of the scorers; None without sparse prefill.
            num_without_resources: Engines of the only node of a cluster without resources.
        """
        listen_on_node_address()
        join_serve_log()
        config, http = args.engine, args.http
        self.model_name = args.model_name
        self._num_without_resources = num_without_resources
        self.in_flight = InFlight(
            lambda: max(1, self._client.nodes.num) * (config.max_running + config.max_queue),
            config.max_running,
            max_share_per_address=http.max_share_per_address,
        )
        own = own_deployment()
        self._peers = IngressPeers(own, own_node_id(), "" if own is None else replica_info()["replica_id"])
        self._limits = SharedLimits(self._peers)
        self._responses = SharedResponses(http, self._peers)
        self.figures = HttpFigures()
        self._tracing = Tracing(args.tracing, args.model_name) if args.tracing.endpoint is not None else None
        self.timelines = Timelines(listener=None if self._tracing is None else self._tracing.send)
        self._http = http
        if in_replica() and not is_guarded():
            log.warning("Serve's HTTP proxies run without Orchard's middleware: %s is %r", HOOK, os.environ.get(HOOK))
        model_dir = resolve_checkpoint(config.model, config.revision, weights=False)
        self._tokenizer = ChatTokenizer(model_dir)
        config_of_model = read_config(model_dir)
        self.max_context_tokens = choose_context(config, config_of_model)
        self._media_kinds = media_kinds(model_dir, config_of_model)
        self._pair_scorer = PairScorer(self.model_name, EmbeddingModel.read(model_dir), read_reranker(model_dir))
        self._is_embedding_model = self._pair_scorer.embedding_model is not None
        self._facts = read_model_facts(
            model_dir,
            config_of_model,
            self._tokenizer,
            self._is_embedding_model,
            is_reranker=self._pair_scorer.reranker is not None,
        )
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
        self._graph = GraphStatus(
            {"engines": engine, "text": text, "mllm": mllm, "spec_prefill": scorer},
            self._ask_ingresses,
            lambda: self._client.nodes.num,
            {"model": self.model_name, "config": shown},
        )
        self._node = NodeReplicas(self.model_name, engine, {"text": text, "media": mllm}, scorer)
        self._has_started = False

    def __serve_build_asgi_app__(self) -> FastAPI:
        late_system, sampling = self._tokenizer.keeps_late_system, self._tokenizer.generation_defaults
        variables = self._tokenizer.template_variables
        model = ModelDefaults(variables, sampling.temperature, sampling.top_p, self._facts)
        return create_app(
            self,
            self._http,
            self._media_kinds,
            late_system,
            is_behind_proxy=in_replica(),
            model=model,
            limits=self._limits,
            responses=self._responses,
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
        self._refuse_reranker("generates no text")
        self._graph.forget()  # a status right before and right after a request must show exact counters
        try:
            with naming_prompt(request):
                stream = await self._client.start(request, route, self._resumes(request))
        except BaseException:
            self._graph.forget()
            raise
        planned = stream.plan.request
        room = planned.sampling.max_tokens
        is_context_limited = request.max_tokens is None or room < request.max_tokens
        rules = answer_rules(request, self._tokenizer, planned.grammar)
        note_end = partial(self._answer_ended, request, stream)
        return TextGeneration(
            stream, self._tokenizer, rules, note_end, is_context_limited, left_open(request, planned.grammar)
        )

    def _answer_ended(self, request: ChatRequest, stream: EngineStream) -> None:
        self._graph.forget()
        if self._replicates and request.keys is not None and stream.node_id:
            self._client.replication.turn_ended(request.keys.conversation, stream.node_id)

    def _resumes(self, request: ChatRequest) -> bool:
        return self._may_resume if request.resume is None else request.resume

    def _refuse_reranker(self, reason: str) -> None:
        if self._pair_scorer.reranker is not None:
            raise InvalidRequest(
                f"The model {self.model_name!r} is a reranker and {reason}. Use POST /v1/rerank or /v1/score.", "model"
            )

    async def embed(self, request: EmbedRequest) -> Embeddings:
        self._refuse_reranker("gives no embeddings")
        shortens = self._is_embedding_model
        return await embed_all(request, self._client.compute, self._client.nodes.num, may_shorten=shortens)

    async def score(self, request: ScoreRequest) -> Scores:
        return await self._pair_scorer.score(request, self._client.compute, self._client.nodes.num)

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

    async def find_response(self, owner: str, id: str) -> StoredResponse | RunningResponse | None:
        """Return a response of this ingress for another one."""
        return self._responses.find_here(owner, id)

    async def delete_response(self, owner: str, id: str) -> bool:
        return self._responses.store.delete(owner, id)

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
        never older than the last start or end of a request at this ingress.
        """
        return await self._graph.status()

    async def _ask_ingresses(self) -> list[dict[str, Any]]:
        own = await self.status_here()
        said = [answer for answer in await self._peers.ask_all(STATUS_TIMEOUT_S, "status_here") if answer is not None]
        return [own, *(answer for answer in said if answer["replica_id"] != own["replica_id"])]

    async def metrics(self, shows_names: bool) -> bytes:
        http = self.figures if shows_names else self.figures.without_names()
        now = self.in_flight.status()
        ingress = IngressFigures(http=http, num_in_flight=now["num_in_flight"], is_draining=now["is_draining"])
        node, more = await self._node.figures()
        return text_of(METRICS, replace(node, ingress=ingress), more)

    async def cache_status(self) -> dict[str, Any]:
        answers, missing = await self._client.ask_all("cache_status", await all_engine_ids(self._num_without_resources))
        return cache_body(answers, missing, self._tokenizer.token_bytes)

    async def clear_cache(self) -> dict[str, Any]:
        return cleared_body(
            *await self._client.ask_all("clear_cache", await all_engine_ids(self._num_without_resources))
        )

    async def drain_on(self, node_id: str) -> None:
        """Drain this ingress if it is on the node, whose machine is about to leave; the others go on."""
        if own_node_id() == node_id:
            await self.drain()

    async def drain_node(self, node_id: str, deadline_s: float = HAND_OVER_S) -> TakenOver:
        engines = await self._engines_of(node_id)
        await self._refuse_last(node_id, engines)
        silent = await self._tell_engines(engines, is_back=False)
        drained = [engine_id for engine_id in engines if engine_id not in {one.engine_id for one in silent}]
        moved = await self._client.hand_over.leave(drained, deadline_s, without=engines)
        _raise_silent(silent, f" Drained: {', '.join(drained)}. {moved}" if drained else "")
        return moved

    async def undo_drain(self, node_id: str) -> None:
        engines = await self._engines_of(node_id)
        if not engines:
            raise NodeNotFound(node_id)
        _raise_silent(await self._tell_engines(engines, is_back=True))

    async def hand_over(self, node_id: str, deadline_s: float) -> TakenOver:
        """Let the other nodes fetch the snapshots of a drained one, see HandOver.leave."""
        return await self._client.hand_over.leave(await self._engines_of(node_id), deadline_s)

    async def _refuse_last(self, node_id: str, engines: Sequence[str]) -> None:
        """Refuse to drain the last engines that take requests. Raises NodeNotFound, Unavailable."""
        if not engines:
            raise NodeNotFound(node_id)
        others = [
            engine_id for engine_id in await all_engine_ids(self._num_without_resources) if engine_id not in engines
        ]
        if not others:
            raise Unavailable("The only node with an engine cannot be drained: stop the server instead.")
        answers, _ = await self._client.ask_all("is_drained", others)
        drained = [one.engine_id for one in answers if one.answer]
        if len(drained) == len(others):
            raise Unavailable(
                f"{node_id} cannot be drained: all other engines are drained already ({', '.join(drained)}). Undo one "
                "of these first, or stop the server."
            )

    async def _tell_engines(self, engines: Sequence[str], is_back: bool) -> list[SilentEngine]:
        """Let engines leave or come back; return those that do not confirm it."""
        said = await asyncio.gather(*(self._client.leave(engine_id, is_back) for engine_id in engines))
        self._graph.forget()
        return [one for one in said if one is not None]

    async def _engines_of(self, node_id: str) -> list[str]:
        """Return the ids of a node's engines, or the only one if the id is an engine's; [] if there is none."""
        return [one for one in await all_engine_ids(self._num_without_resources) if node_id in (one, node_of(one))]

    async def not_ready(self) -> str | None:
        if self.in_flight.is_draining:
            return "The server is shutting down."
        return await self._graph.engines_not_ready()

    async def not_started(self) -> str | None:
        """Once images could be served, the loss of their planner makes only requests with images wait or fail."""
        if (reason := await self.not_ready()) is not None or self._has_started:
            return reason
        self._has_started = not self._media_kinds or await self._graph.has_media_planner()
        return None if self._has_started else "Images cannot be read yet: their planner is being started."


def _raise_silent(silent: Sequence[SilentEngine], others: str = "") -> None:
    """Raise Unavailable if there are engines that did not confirm to leave or to come back.

    Args:
        silent: The engines.
        others: Tells what became of the others.
    """
    if silent:
        named = ", ".join(f"{one.engine_id} ({one.reason})" for one in silent)
        raise Unavailable(f"Engines that did not confirm it: {named}.{others}")


def plan_timeout_s(args: AppArgs) -> float:
    """Return the longest wait for a plan, which includes the scoring of a long prompt."""
    return PLAN_TIMEOUT_S + (args.spec_prefill.deadline_s if args.spec_prefill.enabled else 0)


def own_deployment() -> DeploymentHandle | None:
    """Return a handle to this process's own deployment; None outside a replica."""
    if not in_replica():
        return None
    own = serve.get_replica_context()
    handle = serve.get_deployment_handle(own.deployment, own.app_name)
    return handle.options(method_name="status_here")  # connects the handle before the first call


async def all_engine_ids(num_without_resources: int) -> list[str]:
    """Return the ids of all engines, also while they are starting; [''] without Ray.

    Args:
        num_without_resources: Engines of the only node of a cluster without resources.
    """
    if not ray.is_initialized():
        return [""]
    nodes = await asyncio.to_thread(engines_by_node, num_without_resources)
    return [engine_id for node_id, num in nodes.items() for engine_id in engine_ids(node_id, num)]
