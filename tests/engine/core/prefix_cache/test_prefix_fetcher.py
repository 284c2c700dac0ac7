"""Two engines with disk tiers: one fetches from the other what it lacks of a prompt, or computes it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import DiskCacheConfig, EngineConfig
from engine.core.engine_core import EngineCore
from engine.placement import PrefixHolder
from engine.protocol import EngineRequest, FinishReason, SamplingParams
from engine.snapshot_store.exchange import Sharing, SnapshotExchange
from engine.snapshot_store.files import SnapshotFiles
from tests.engine.core.prefix_cache.test_disk_tier import request, turns
from tests.engine.snapshot_store.peers import Relay, cut_at, flip_at
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.fake_runner import FakeRunner, answer

TOKEN_S = 0.1
"""Predicted seconds of computing a token: everything but a hopeless transfer is worth its time."""


class Node(Driver):
    """An engine with a disk tier and an exchange."""

    def __init__(self, path: Path, fingerprint: str = "model", token: bytes = b"secret"):
        super().__init__(FakeRunner())
        self.files = SnapshotFiles(DiskCacheConfig(path=str(path), max_gb=1), fingerprint)
        self.exchange = SnapshotExchange(self.files, Sharing("127.0.0.1", token), 0, fingerprint, self._write)
        self.core = EngineCore(
            EngineConfig(), FakeRunner(), self._publish, files=self.files, peers=self.exchange.client
        )
        fix_prefill_costs(self.core, 0.0, TOKEN_S)

    def _write(self, digest: str) -> "Future[bool]":
        """As on the engine's thread, which waits meanwhile."""
        done: Future[bool] = Future()
        done.set_result(self.core.prefixes.write_now(digest))
        return done

    def serve(self, *requests: EngineRequest) -> list[int]:
        """Serve requests one after the other; return how many tokens of each were cached."""
        for one in requests:
            self.run({0: [one]})
            self.files.flush()
            assert self.finish[one.request_id] is FinishReason.LENGTH and self.tokens[one.request_id] == answer(one)
            assert self.core.prefixes.store.integrity_error() is None
        return [self.chunks[one.request_id][0].num_cached for one in requests]

    def holder(self, num_tokens: int, address: str | None = None) -> PrefixHolder:
        entry = next(e for e in self.core.prefixes.store.nodes() if e.num_tokens == num_tokens)
        return PrefixHolder(address or self.exchange.address, entry.digest, num_tokens)

    @property
    def failures(self) -> dict[str, int]:
        return self.exchange.client.failures()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(**more: Any) -> Node:
        made.append(Node(tmp_path / str(len(made)), **more))
        return made[-1]

    yield make
    for one in made:
        one.core.close()
        one.exchange.close()


LENGTH = 40 + 3 * 20
"""Tokens of `turns(3)`."""


def test_a_prefix_that_another_node_holds_is_fetched(nodes):
    there, here = nodes(), nodes()
    there.serve(*(request(f"t{i}", *turns(i)) for i in (1, 2, 3)))
    follow_up = replace(request("again", *turns(4)), holder=there.holder(LENGTH))
    assert here.serve(follow_up) == [LENGTH]
    assert here.exchange.status().num_fetched == there.exchange.status().num_served == 4
    assert (here.failures, here.core.prefixes.store.counters.num_hits) == ({}, 1)
    assert here.serve(replace(follow_up, request_id="later", holder=None)) == [LENGTH + 20]


def test_only_the_tokens_that_are_missing_are_fetched(nodes):
    there, here = nodes(), nodes()
    there.serve(*(request(f"t{i}", *turns(i)) for i in (1, 2, 3, 4, 5, 6)))
    here.serve(*(request(f"h{i}", *turns(i)) for i in (1, 2)))
    assert here.serve(replace(request("again", *turns(7)), holder=there.holder(40 + 6 * 20))) == [40 + 6 * 20]
    assert here.exchange.status().num_fetched == 4


def test_nothing_is_fetched_if_as_much_is_cached_here(nodes):
    there, here = nodes(), nodes()
    for node in (there, here):
        node.serve(request("t", *turns(3)))
    assert here.serve(replace(request("again", *turns(4)), holder=there.holder(LENGTH))) == [LENGTH]
    assert there.exchange.status().num_connections == there.exchange.status().num_served == 0


def test_nothing_is_fetched_if_computing_is_faster(nodes):
    there, here = nodes(), nodes()
    there.serve(request("t", *turns(3)))
    here.core.costs.record_fetch(there.exchange.address, 1000, 1e6)
    assert here.serve(replace(request("again", *turns(4)), holder=there.holder(LENGTH))) == [0]
    assert here.failures == {"slow": 1} and there.exchange.status().num_served == 0


def test_a_slow_node_is_measured_again_later(nodes, monkeypatch):
    there, here = nodes(), nodes()
    there.serve(request("t", *turns(3)))
    address, fetcher = there.exchange.address, here.core.prefixes._restorer._fetcher
    here.core.costs.record_fetch(address, 1000, 1e6)
    fetcher._measured_s[address] = fetcher._clock() - 1000
    assert here.serve(replace(request("again", *turns(4)), holder=there.holder(LENGTH))) == [LENGTH]


def test_the_rate_of_a_node_is_learned_from_transfers(nodes):
    there, here = nodes(), nodes()
    there.serve(request("t", *turns(3)))
    here.serve(replace(request("again", *turns(4)), holder=there.holder(LENGTH)))
    costs = here.core.costs
    assert costs.fetched_byte_s(there.exchange.address) != costs.fetched_byte_s("elsewhere:1")
    assert costs.fetched_byte_s() == costs.fetched_byte_s(there.exchange.address), "the mean of those measured"


def test_a_snapshot_that_was_never_written_is_written_on_demand(nodes):
    there, here = nodes(), nodes()
    there.serve(request("t", *turns(3)))
    holder = there.holder(LENGTH)
    there.files.clear().result(60)
    assert there.files.entries() == []
    assert here.serve(replace(request("again", *turns(4)), holder=holder)) == [LENGTH]


def test_a_snapshot_whose_keys_are_lent_to_a_decoding_row_is_written_on_demand(nodes):
    """The row that decodes keeps its tokens."""
    there, here = nodes(), nodes()
    there.serve(request("t", *turns(2)))
    running = replace(request("running", *turns(3)), sampling=SamplingParams(30, seed=1))
    there.core.add_request(running)
    while "running" not in there.chunks:
        there.core.step()
    assert here.serve(replace(request("again", *turns(4)), holder=there.holder(LENGTH))) == [LENGTH]
    there.run({0: []})
    assert there.tokens["running"] == answer(running)


@pytest.mark.parametrize("change", [{"digest": "0" * 40}, {"num_tokens": LENGTH - 1}])
def test_a_holder_of_another_prefix_is_not_asked(nodes, change):
    there, here = nodes(), nodes()
    there.serve(request("t", *turns(3)))
    holder = replace(there.holder(LENGTH), **change)
    assert here.serve(replace(request("again", *turns(4)), holder=holder)) == [0]
    assert here.failures == {"mismatch": 1} and there.exchange.status().num_refused == 0


def test_another_tenant_gets_nothing(nodes):
    there, here = nodes(), nodes()
    there.serve(request("t", *turns(3), tenant="one"))
    other = replace(request("again", *turns(4), tenant="other"), holder=there.holder(LENGTH))
    assert here.serve(other) == [0] and here.failures == {"mismatch": 1}


@pytest.mark.parametrize(
    "other, reason", [({"fingerprint": "another"}, "fingerprint"), ({"token": b"another"}, "token")]
)
def test_a_node_of_another_model_or_cluster_is_a_miss(nodes, other, reason):
    there, here = nodes(), nodes(**other)
    there.serve(request("t", *turns(3)))
    assert here.serve(replace(request("again", *turns(4)), holder=there.holder(LENGTH))) == [0]
    assert here.failures == {reason: 1}


def test_a_node_that_has_left_is_a_miss(nodes):
    there, here = nodes(), nodes()
    there.serve(request("t", *turns(3)))
    holder = there.holder(LENGTH)
    there.exchange.close()
    assert here.serve(replace(request("again", *turns(4)), holder=holder)) == [0]
    assert here.failures == {"unreachable": 1}


@pytest.mark.parametrize("position", [0, 100, 400, 2000, 4000])
@pytest.mark.parametrize("damage", [cut_at, flip_at])
def test_a_damaged_or_incomplete_transfer_gives_the_same_tokens(nodes, damage, position, monkeypatch):
    monkeypatch.setattr("engine.snapshot_store.wire.FRAME_S", 0.3)
    there, here = nodes(), nodes()
    there.serve(*(request(f"t{i}", *turns(i)) for i in (1, 2, 3)))
    relay = Relay(there.exchange.address, damage(position))
    cached = here.serve(replace(request("again", *turns(4)), holder=there.holder(LENGTH, relay.address)))
    assert cached[0] < LENGTH and sum(here.failures.values()) == 1
    relay.close()


def test_the_files_that_arrived_before_a_failure_are_used(nodes):
    there, here = nodes(), nodes()
    there.serve(*(request(f"t{i}", *turns(i)) for i in (1, 2, 3)))
    there.holder(LENGTH)
    size = sum(file.num_bytes for file in there.files.chain_of(there.holder(LENGTH).digest))
    relay = Relay(there.exchange.address, cut_at(int(0.9 * size)))
    cached = here.serve(replace(request("again", *turns(4)), holder=there.holder(LENGTH, relay.address)))
    assert 0 < cached[0] < LENGTH
    relay.close()


def stalled(there: Node, num_bytes: int, stopped: threading.Event) -> Relay:
    def stall(data: bytes, num_before: int) -> bytes:
        if num_before + len(data) > num_bytes:
            stopped.wait(30)
        return data

    return Relay(there.exchange.address, stall)


def test_a_transfer_beyond_its_time_limit_is_stopped_and_the_prompt_computed(nodes, monkeypatch):
    monkeypatch.setattr("engine.core.prefix_cache.prefix_fetcher.FETCH_TIMEOUT_S", 0.05)
    monkeypatch.setattr("engine.core.prefix_cache.prefix_fetcher.FETCH_TIMEOUT_FACTOR", 0.0)
    there, here, stopped = nodes(), nodes(), threading.Event()
    there.serve(request("t", *turns(3)))
    relay = stalled(there, 300, stopped)
    assert here.serve(replace(request("again", *turns(4)), holder=there.holder(LENGTH, relay.address))) == [0]
    stopped.set()
    relay.close()


def test_other_rows_decode_while_a_prompt_waits_for_its_transfer(nodes):
    there, here, stopped = nodes(), nodes(), threading.Event()
    there.serve(request("t", *turns(3)))
    relay = stalled(there, 300, stopped)
    neighbour = replace(request("neighbour", [5] * 40, [6] * 30), sampling=SamplingParams(30, seed=1))
    waiting = replace(request("again", *turns(4)), holder=there.holder(LENGTH, relay.address))
    here.core.add_request(neighbour)
    here.core.step()
    here.core.add_request(waiting)
    while "neighbour" not in here.finish:
        here.core.step()
    assert "again" not in here.chunks and here.tokens["neighbour"] == answer(neighbour)
    stopped.set()
    here.run({0: []})
    assert here.chunks["again"][0].num_cached == LENGTH and here.tokens["again"] == answer(waiting)
    relay.close()


def test_the_transfer_of_an_aborted_request_is_stopped(nodes):
    there, here, stopped = nodes(), nodes(), threading.Event()
    there.serve(request("t", *turns(3)))
    relay = stalled(there, 300, stopped)
    here.core.add_request(replace(request("again", *turns(4)), holder=there.holder(LENGTH, relay.address)))
    here.core.step()
    [prompt] = here.core.scheduler.prefills.in_progress
    assert prompt.session is not None and prompt.session.fetching is not None
    fetching = prompt.session.fetching
    here.run({0: []}, {0: ["again"]})
    assert fetching.fetch.done.result(60).failure == "stopped"
    stopped.set()
    relay.close()


def test_an_engine_without_an_exchange_ignores_the_holder(tmp_path):
    driver = Driver(FakeRunner())
    spec = replace(request("r", *turns(2)), holder=PrefixHolder("127.0.0.1:1", "0" * 40, 60))
    driver.run({0: [spec]})
    assert driver.tokens["r"] == answer(spec)
    assert np.array_equal(spec.token_ids, request("r", *turns(2)).token_ids)
