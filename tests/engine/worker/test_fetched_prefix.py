"""Models of five families: the tokens after a prefix from another engine equal those after a computed one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.config import DiskCacheConfig, EngineConfig
from engine.core.engine_core import EngineCore
from engine.placement import PrefixHolder
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.snapshot_store.exchange import Sharing, SnapshotExchange
from engine.snapshot_store.files import SnapshotFiles
from engine.worker.model_runner import MLXRunner
from tests.engine.snapshot_store.peers import Relay, cut_at, flip_at
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.families import FAMILIES
from tests.support.night import some_at_night
from tests.support.tiny import Tiny, build
from tests.support.zoo import make

NUM_PROMPT, NUM_TOKENS = 300, 12


class Node(Driver):
    """An engine with a disk tier and an exchange; computing is predicted to be slow. Nodes share one runner."""

    def __init__(self, runner: MLXRunner, path: Path, fingerprint: str = ""):
        super().__init__(runner)
        self.files = SnapshotFiles(DiskCacheConfig(path=str(path)), runner.fingerprint)
        sharing = Sharing("127.0.0.1", b"secret")
        self.exchange = SnapshotExchange(self.files, sharing, 0, fingerprint or runner.fingerprint)
        self.core = EngineCore(EngineConfig(), runner, self._publish, files=self.files, peers=self.exchange.client)
        fix_prefill_costs(self.core, 0.0, 1.0)

    def close(self) -> None:
        self.exchange.close()
        self.files.flush()
        self.files.close(timeout_s=5)
        self.core.prefixes.store.reset()


FAMILIES_OF_LAYERS = ["llama", "hybrid", "deepseek_v3", "llama4", "qwen4_exp", "deepseek_v4"]


@pytest.fixture(scope="module", params=FAMILIES_OF_LAYERS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MLXRunner:
    """Never closed: that would take the main thread's streams from the tests that follow."""
    path = tmp_path_factory.mktemp("model") / request.param
    made = build(path, Tiny(layers=4, interval=2)) if request.param == "hybrid" else make(path, FAMILIES[request.param])
    config = EngineConfig(model=str(made), dtype="float32")
    return load_cold(config)


@pytest.fixture
def node(runner: MLXRunner, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make_node(fingerprint: str = "") -> Node:
        made.append(Node(runner, tmp_path / str(len(made)), fingerprint))
        return made[-1]

    yield make_node
    for one in made:
        one.close()


def first_turn() -> EngineRequest:
    ids = np.random.default_rng(3).integers(20, 90, NUM_PROMPT).astype(np.int32)
    boundaries = (Boundary("system", 100), Boundary("turn", 290))
    return EngineRequest("first", ids, SamplingParams(20, temperature=0.0), (), boundaries=boundaries)


def second_turn(answer: list[int]) -> EngineRequest:
    first, more = first_turn(), np.random.default_rng(4).integers(20, 90, 25)
    ids = np.concatenate([first.token_ids, answer, more]).astype(np.int32)
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0)
    return replace(first, request_id="second", token_ids=ids, sampling=sampling)


def serve_first(there: Node) -> tuple[EngineRequest, PrefixHolder]:
    """Serve the first turn; return the second one, and the holder of the longest prefix."""
    there.run({0: [first_turn()]})
    there.files.flush()
    longest = max(there.core.prefixes.store.nodes(), key=lambda entry: entry.num_tokens)
    assert longest.kind == "answer"
    spec = second_turn(there.tokens["first"])
    return spec, PrefixHolder(there.exchange.address, longest.digest, longest.num_tokens)


def computed(runner: MLXRunner, spec: EngineRequest) -> list[int]:
    driver = Driver(runner, EngineConfig.model_validate({"prefix_cache": {"enabled": False}}))
    return driver.run({0: [spec]})["second"]


def test_tokens_after_a_fetched_prefix_equal_those_after_a_computed_one(runner, node):
    there, here = node(), node()
    spec, holder = serve_first(there)
    here.run({0: [replace(spec, holder=holder)]})
    assert here.chunks["second"][0].num_cached == min(holder.num_tokens, len(spec.token_ids)) > NUM_PROMPT
    assert here.tokens["second"] == computed(runner, spec)
    assert (here.exchange.status().failures, here.exchange.status().num_fetched) == ({}, 3)


@pytest.mark.parametrize(
    "runner",
    some_at_night(FAMILIES_OF_LAYERS, ["hybrid"], "what is damaged is found before any layer reads it"),
    indirect=True,
    scope="module",
)
@pytest.mark.parametrize(
    ("damage", "share"),
    some_at_night(
        product((cut_at, flip_at), (0.1, 0.5, 0.95)),
        [(cut_at, 0.5), (flip_at, 0.1), (flip_at, 0.95)],
        "the gate cuts a transfer once, and damages it near both ends",
        are_sets=True,
    ),
)
def test_tokens_after_a_damaged_or_incomplete_transfer_equal_those_after_a_computed_prefix(runner, node, damage, share):
    there, here = node(), node()
    spec, holder = serve_first(there)
    size = sum(file.num_bytes for file in there.files.chain_of(holder.digest))
    relay = Relay(there.exchange.address, damage(int(share * size)))
    here.run({0: [replace(spec, holder=replace(holder, address=relay.address))]})
    relay.close()
    assert here.chunks["second"][0].num_cached < holder.num_tokens
    assert here.tokens["second"] == computed(runner, spec)
    assert sum(here.exchange.status().failures.values()) == 1


@pytest.mark.parametrize(
    "runner",
    some_at_night(FAMILIES_OF_LAYERS, ["hybrid"], "a fingerprint is compared before any layer is read"),
    indirect=True,
    scope="module",
)
def test_a_model_with_another_fingerprint_is_refused_and_its_tokens_computed(runner, node):
    there, here = node("another model"), node()
    spec, holder = serve_first(there)
    here.run({0: [replace(spec, holder=holder)]})
    assert here.chunks["second"][0].num_cached == 0
    assert here.tokens["second"] == computed(runner, spec)
    assert here.exchange.status().failures == {"fingerprint": 1}
