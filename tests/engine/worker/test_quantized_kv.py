"""Keys and values of 8 and 4 bits: how they are packed, what a model computes with them, which models are refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache, QuantizedKVCache

from engine.config import DiskCacheConfig, EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import EngineFailed
from engine.protocol import Boundary, EngineRequest, SamplingParams
from engine.snapshot_store.files import SnapshotFiles
from engine.worker import quantized_kv
from engine.worker.burst_layer import BurstForward
from engine.worker.language_model import LanguageModel
from engine.worker.layer_kinds import kind_of
from engine.worker.loader import open_model
from engine.worker.model_report import RowBytes
from engine.worker.model_runner import MLXRunner, load_runner
from engine.worker.quantized_kv import KVFormat
from engine.worker.snapshot import import_arrays, is_finite
from tests.support.driver import Driver
from tests.support.families import FAMILIES
from tests.support.families.family import Family, text
from tests.support.night import some_at_night
from tests.support.sparse_prompts import with_plan
from tests.support.tiny import Tiny, build
from tests.support.zoo import empty_cache, make

HEAD_DIM = 32
NUM_TOKENS = 10
NO_CACHE: dict[str, Any] = {"prefix_cache": {"enabled": False}}
PLAIN = Family(text("llama", head_dim=HEAD_DIM), "KVCache*3", seed=3)
HYBRID = Tiny(layers=4, interval=2, agree=0.3, head_dim=HEAD_DIM)


class Model:
    """A runner, and the tokens of the library's forward over the whole sequence with its own quantized caches."""

    def __init__(self, path: Path, bits: int):
        self.bits = bits
        self.config = EngineConfig.model_validate({"model": str(path), "kv_cache": {"bits": bits}})
        self.runner: MLXRunner = load_runner(self.config, lambda progress: None)
        self.lm = self.runner._model.module.language_model
        self.has_head = "mtp" not in self.runner.no_drafts

    def reference(self, token_ids: list[int], positions: list[int] | None = None) -> list[int]:
        """Return NUM_TOKENS greedy tokens. positions: of the tokens of the prompt, if some are left out."""
        tokens = list(token_ids)
        for i in range(NUM_TOKENS):
            where = {} if positions is None else {"position_ids": self._where([*positions, *range(60, 60 + i)])}
            layers = [
                QuantizedKVCache(HEAD_DIM, self.bits) if type(layer) is KVCache else layer
                for layer in empty_cache(self.lm)
            ]
            logits = self.lm(mx.array([tokens], mx.int32), cache=layers, **where).logits
            tokens.append(int(np.array(logits[0, -1]).argmax()))
        return tokens[len(token_ids) :]

    def _where(self, positions: list[int]) -> mx.array:
        return mx.broadcast_to(mx.array(positions, mx.int32), (3, 1, len(positions)))

    def driver(self, **config: Any) -> Driver:
        return Driver(self.runner, EngineConfig.model_validate({"prefill_chunk_tokens": 16} | config))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Model]:
    """Runners are never closed: that would take the main thread's streams from the tests that follow."""
    root = tmp_path_factory.mktemp("models")
    paths = {"plain": make(root / "plain", PLAIN), "hybrid": build(root / "hybrid", HYBRID)}
    return cache(lambda kind, bits: Model(paths[kind], bits))


MODELS = some_at_night(
    [("plain", 8), ("plain", 4), ("hybrid", 8), ("hybrid", 4)],
    [("plain", 4), ("hybrid", 8)],
    "the gate has each model and each number of bits",
)


@pytest.fixture(params=MODELS, ids=lambda one: f"{one[0]} {one[1]}")
def model(request: pytest.FixtureRequest, models: Callable[[str, int], Model]) -> Model:
    return models(*request.param)


def ids(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(20, 500, num_tokens).tolist()


def greedy(name: str, token_ids: list[int], max_tokens: int = NUM_TOKENS) -> EngineRequest:
    boundaries = (Boundary("system", 25),) if len(token_ids) > 25 else ()
    sampling = SamplingParams(max_tokens, temperature=0.0)
    return EngineRequest(name, np.array(token_ids, np.int32), sampling, (), boundaries=boundaries)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("head_dim", "group_size"), [(128, 64), (96, 32)])
def test_unpacked_values_are_exactly_those_of_the_library(bits, head_dim, group_size, dtype):
    computed = mx.random.normal((2, 3, 7, head_dim), key=mx.random.key(0)).astype(dtype)
    form = KVFormat.of(computed, computed, bits).keys
    packed = form.pack(computed)
    expected = mx.dequantize(*mx.quantize(computed, group_size, bits), group_size, bits)
    assert form.group_size == group_size and packed.dtype == mx.uint32
    assert mx.array_equal(form.unpack(packed), expected).item()
    assert packed.nbytes == 2 * 3 * 7 * (head_dim * bits // 8 + 2 * head_dim // group_size * dtype.size)
    assert mx.array_equal(form.unpack(form.zeros(2)), mx.zeros((1, 3, 2, head_dim))).item()


@pytest.mark.parametrize("bits", [8, 4])
def test_keys_and_values_of_unlike_sizes_are_packed_each_by_its_own(bits):
    """Latent attention stores latents, and the rotated parts of the keys beside them."""
    sizes = {128: 64, 32: 32}
    keys, values = (mx.random.normal((1, 1, 7, size), key=mx.random.key(size)) for size in sizes)
    form = KVFormat.of(keys, values, bits)
    for group_size, found, computed in zip(
        sizes.values(), form.unpack(*form.pack(keys, values)), (keys, values), strict=True
    ):
        expected = mx.dequantize(*mx.quantize(computed, group_size, bits), group_size, bits)
        assert mx.array_equal(found, expected).item()
    assert form.token_bytes == (128 + 32) * 4


def test_prompts_that_share_a_forward_see_the_keys_and_values_that_each_sees_alone():
    before, lengths = (5, 2), (3, 1)
    keys, values = mx.random.normal((2, 2, 3, 8, HEAD_DIM), key=mx.random.key(0))
    form = KVFormat.of(keys, values, 8)
    shared, alone = ([quantized_kv.QuantizedKVCache(form) for _ in before] for _ in range(2))
    for row, num in enumerate(before):
        for caches in (shared, alone):
            caches[row].update_and_fetch(keys[row : row + 1, :, :num], values[row : row + 1, :, :num])
    layer = kind_of(shared[0]).burst_layer(shared, BurstForward(lengths, as_offset=True))
    found = layer.update_and_fetch(keys[:, :, 5:], values[:, :, 5:])
    for row, (num, length) in enumerate(zip(before, lengths, strict=True)):
        new = (array[row : row + 1, :, 5 : 5 + length] for array in (keys, values))
        for one, expected in zip(found, alone[row].update_and_fetch(*new), strict=True):
            assert mx.array_equal(one[row, :, : num + length], expected[0]).item()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3", r"layer 0 has keys or values of 16 dimensions per head, expected a multiple of 64 or 32; use 16"),
        ("mamba2", r"no layer stores keys and values of all tokens, so that it would have no effect; use 16"),
        ("deepseek_v32", r"layer 0 has keys or values of 16 dimensions per head"),
    ],
)
def test_model_that_cannot_store_so_few_bits_is_refused_before_its_weights_are_read(family, reason, tmp_path):
    path, before = make(tmp_path / "model", FAMILIES[family]), mx.get_active_memory()
    with pytest.raises(EngineFailed, match=f"kv_cache.bits is 4: {reason}"):
        open_model(EngineConfig.model_validate({"model": str(path), "kv_cache": {"bits": 4}}))
    assert mx.get_active_memory() - before < 2**16
    assert open_model(EngineConfig(model=str(path))).dtype == "float32"


@pytest.mark.parametrize("chunk", [3, 2048])
def test_request_alone_gets_the_tokens_of_the_librarys_quantized_caches(model: Model, chunk):
    driver = model.driver(prefill_chunk_tokens=max(chunk, 16), **NO_CACHE)
    driver.run({0: [greedy("r", ids(45))]})
    assert driver.tokens["r"] == model.reference(ids(45))


def test_request_in_a_batch_gets_the_same_tokens_as_alone(model: Model):
    """Rows of other lengths arrive together and later, one is aborted, and all that can be drafted is."""
    driver = model.driver(mtp={"max_draft_tokens": 3, "max_rows": 8} if model.has_head else "auto")
    prompts = {"first": ids(45), "short": ids(7, 1), "middle": ids(30, 2), "late": ids(20, 3)}
    arrivals = {0: ["first", "short"], 1: ["middle"], 9: ["late"]}
    requests = {step: [greedy(name, prompts[name]) for name in names] for step, names in arrivals.items()}
    requests[4] = [greedy("aborted", ids(33, 4), 100)]
    driver.run(requests, {12: ["aborted"]})
    for name, prompt in prompts.items():
        assert driver.tokens[name] == model.reference(prompt), name
    assert not model.has_head or sum(chunk.num_drafted for chunk in driver.chunks["first"])


def test_second_turn_gets_the_same_tokens_from_memory_and_from_disk_as_computed(model: Model, tmp_path: Path):
    first, driver = ids(45), model.driver()
    driver.run({0: [greedy("first", first)]})
    second = [*first, *driver.tokens["first"], *ids(9, 5)]
    driver.run({0: [greedy("second", second)]})
    expected = model.reference(second)
    assert driver.tokens["second"] == expected and driver.chunks["second"][0].num_cached > 25
    with disk(model.runner, tmp_path) as written:
        written.run({0: [greedy("first", first)]})
    with disk(model.runner, tmp_path) as read:
        read.run({0: [greedy("second", second)]})
        assert read.tokens["second"] == expected and read.chunks["second"][0].num_cached > 25


@contextmanager
def disk(runner: MLXRunner, path: Path) -> Iterator[Driver]:
    """Return a driver whose engine has a disk tier at this path; its files are written at the end."""
    files, driver = SnapshotFiles(DiskCacheConfig(path=str(path)), runner.fingerprint), Driver(runner)
    driver.core = EngineCore(EngineConfig(), runner, driver._publish, files=files)
    yield driver
    files.flush()
    files.close(timeout_s=5)


def test_sparse_prompt_gets_the_tokens_of_a_forward_over_its_kept_tokens(model: Model):
    """With all tokens kept, those of the dense prompt. Models without explicit positions have dense ones alone."""
    if model.runner.no_sparse is not None:
        return
    prompt = ids(60)
    kept = sorted({*range(5), *range(8, 60, 3), 59})
    driver = model.driver(**NO_CACHE)
    whole = with_plan(greedy("whole", prompt), np.arange(60))
    driver.run({0: [whole], 3: [with_plan(greedy("sparse", prompt), np.array(kept))]})
    assert driver.tokens["whole"] == model.reference(prompt)
    assert driver.tokens["sparse"] == model.reference([prompt[i] for i in kept], kept)


def test_row_takes_the_bytes_that_the_report_and_the_budget_say(model: Model):
    runner = model.runner
    driver = model.driver(**NO_CACHE)
    driver.core.add_request(greedy("r", ids(300), 40))
    while not driver.tokens["r"]:
        driver.core.step()
    row = RowBytes.of(LanguageModel(model.lm, kv_bits=model.bits)).row(300)
    if not model.has_head:
        assert runner.memory()["decode_cache_bytes"] == row
    per_head = HEAD_DIM * model.bits // 8 + 2 * 4
    num_layers = 3  # the hybrid has two attention layers and one in its MTP head
    assert runner.costs.token_bytes == num_layers * 2 * 2 * per_head
    assert runner.costs.unpacked_bytes >= 2 * 2 * HEAD_DIM * 4
    assert runner.costs.pair_bytes >= 4 * 4  # scores of four heads
    driver.core.abort("r")
    driver.run({0: []})


def test_snapshot_of_another_number_of_bits_is_not_restored(models, tmp_path: Path):
    """Neither found among the files, nor taken if it were."""
    written, other = models("plain", 8).runner, models("plain", 4).runner
    with disk(written, tmp_path) as driver:
        driver.run({0: [greedy("first", ids(45))]})
    assert other.fingerprint != written.fingerprint and any(tmp_path.iterdir())
    with disk(other, tmp_path) as driver:
        driver.run({0: [greedy("second", [*ids(45), *ids(9, 5)])]})
    assert driver.chunks["second"][0].num_cached == 0
    snapshot, like = written._a_snapshot, other._a_snapshot
    assert snapshot is not None and like is not None
    foreign = import_arrays(written.export_snapshot(snapshot), like, snapshot.num_tokens, None)
    with pytest.raises(ValueError, match=r"0.keys: expected uint32 \(1, 2, \d+, 6\), found uint32 \(1, 2, \d+, 10\)"):
        list(foreign)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_quantized_state_that_is_not_finite_is_recognized(value):
    computed = mx.ones((1, 2, 4, HEAD_DIM))
    layer = quantized_kv.QuantizedKVCache(KVFormat.of(computed, computed, 8))
    layer.update_and_fetch(computed, computed)
    assert is_finite([layer])
    computed[0, 1, 0, 3] = value
    layer.update_and_fetch(computed[:, :, :1], mx.ones((1, 2, 1, HEAD_DIM)))
    assert not is_finite([layer])
