"""Snapshots of real rows: what they hold, that nobody changes them, and their way through host memory and files."""

import gc
from dataclasses import replace
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache, RotatingKVCache

from engine.config import EngineConfig
from engine.core.row import Row
from engine.protocol import Boundary, EngineRequest
from engine.worker.drafting import hidden_bytes
from engine.worker.model_runner import MLXRunner
from engine.worker.snapshot import StateSnapshot, export, import_arrays, restore, take
from engine.worker.window_layer import last_tokens
from tests.support.cold_runner import load_cold

STORY = "Tell me a story about a red circle and a blue square that meet at the market and count their apples."


@pytest.fixture(scope="module")
def request_(make_request) -> EngineRequest:
    return make_request("story", STORY, max_tokens=12, stops=False)


@pytest.fixture(scope="module")
def half(tiny_model) -> MLXRunner:
    path = tiny_model(dtype="bfloat16")
    return load_cold(EngineConfig(model=str(path), dtype="bfloat16"))


def taken(runner: MLXRunner, request: EngineRequest, *lengths: int) -> list[StateSnapshot]:
    """At each of these lengths, one behind the other."""
    row, num_prefilled, snapshots = Row(replace(request, request_id="taken")), 0, []
    for length in lengths:
        num_prefilled += runner.prefill([row], length - num_prefilled).num_tokens
        snapshot = runner.snapshot([row], snapshots[-1].segment if snapshots else None)
        assert snapshot is not None
        snapshots.append(snapshot)
    runner.drop([row.id])
    return snapshots


def arrays(snapshot: StateSnapshot) -> list[np.ndarray]:
    kv = [array for layer in snapshot.segment.keys_values for array in layer]
    states = [array for state in snapshot.states for array in state]
    every = [*kv, *states, *([] if snapshot.hidden is None else [snapshot.hidden])]
    return [np.array(array.astype(mx.float32)) for array in every]


def answer(drive: Any, runner: MLXRunner, request: EngineRequest, snapshot: StateSnapshot | None) -> list[int]:
    """The tokens of a row that goes on from the snapshot; without one, from the start."""
    driver = drive(EngineConfig.model_validate({"prefix_cache": {"enabled": False}, "mtp": "off"}), runner)
    if snapshot is None:
        return driver.run({0: [request]})[request.request_id]
    prefill = runner.prefill

    def restoring(rows: Any, max_tokens: int) -> Any:
        if rows[0].prompt.num_prefilled == 0:
            runner.restore(rows, snapshot)
            rows[0].prompt.num_prefilled = snapshot.num_tokens
        return prefill(rows, max_tokens)

    runner.prefill = restoring  # type: ignore[method-assign]
    try:
        return driver.run({0: [request]})[request.request_id]
    finally:
        del runner.prefill


def test_an_answer_from_a_snapshot_of_any_length_is_that_of_the_whole_prompt(drive, runner, request_):
    cold = answer(drive, runner, request_, None)
    lengths = [1, 2, 17, len(request_.token_ids) - 1]
    for snapshot in taken(runner, request_, *lengths):
        assert answer(drive, runner, request_, snapshot) == cold, snapshot.num_tokens


def test_a_snapshot_is_not_changed_by_requests_that_use_it(drive, runner, request_):
    first, second = taken(runner, request_, 10, 20)
    before = [array.copy() for array in (*arrays(first), *arrays(second))]
    for seed in range(3):
        hot = replace(request_, sampling=replace(request_.sampling, temperature=2.0, seed=seed))
        answer(drive, runner, hot, second)
        answer(drive, runner, hot, first)
    after = [*arrays(first), *arrays(second)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_snapshot_takes_the_memory_that_it_counts_and_no_more(runner, make_request):
    """Slices may keep the whole buffer alive that they were cut from."""
    long = make_request("long", STORY * 20, max_tokens=1)
    taken(runner, long, 256)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    first, second = taken(runner, long, 256, 300)
    gc.collect()
    counted = first.segment_bytes + first.state_bytes + second.segment_bytes + second.state_bytes
    assert counted <= mx.get_active_memory() - before < counted + 2**18
    del first
    gc.collect()
    assert mx.get_active_memory() - before < counted - second.state_bytes + 2**18, "the first one's states are free"


def test_a_hidden_state_that_waits_for_the_head_has_the_bytes_that_memory_counts(runner, half, request_):
    for each, num_bytes in ((runner, 4), (half, 2)):
        spec = replace(request_, token_ids=request_.token_ids % each.vocab_size)
        hidden = taken(each, spec, 20)[0].hidden
        assert hidden is not None and hidden.nbytes == num_bytes * each._language_model.args.hidden_size
        assert hidden_bytes(each._heads, each._language_model) == hidden.nbytes


def test_the_kv_segments_of_a_prompt_add_up_to_one_copy_of_its_keys_and_values(runner, request_):
    (whole,) = taken(runner, request_, 30)
    parts = taken(runner, request_, 10, 20, 30)
    assert sum(part.segment_bytes for part in parts) == whole.segment_bytes
    assert parts[-1].state_bytes == whole.state_bytes


@pytest.mark.parametrize("which", ["demo", "bfloat16"])
def test_an_exported_and_imported_snapshot_is_the_same(request, request_, which):
    runner = request.getfixturevalue("runner" if which == "demo" else "half")
    spec = replace(request_, token_ids=request_.token_ids % runner.vocab_size)
    parent = None
    for snapshot in taken(runner, spec, 10, 20):
        exported = {name: array.copy() for name, array in runner.export_snapshot(snapshot).items()}
        *_, imported = runner.import_snapshot(exported, snapshot.num_tokens, parent)
        pairs = zip(arrays(snapshot), arrays(imported), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)
        assert imported.segment.ends == snapshot.segment.ends
        parent = imported.segment


WINDOW = 8


def caches_of(num_tokens: int) -> list[Any]:
    """Return the caches of a row: all keys and values, and a window that has read one token less, as a head's has."""
    caches: list[Any] = [KVCache(), RotatingKVCache(max_size=WINDOW)]
    for i, cache in enumerate(caches if num_tokens else ()):
        keys, values = mx.random.normal((2, 1, 2, num_tokens - i, 4), key=mx.random.key(i))
        cache.update_and_fetch(keys, values)
    return caches


@pytest.mark.parametrize("num_tokens", [3, WINDOW, WINDOW + 1, 20])
def test_a_window_that_lags_behind_its_row_does_so_in_snapshots(num_tokens):
    row = caches_of(num_tokens)
    snapshot, like = (take(one, None, num, None) for one, num in ((row, num_tokens), (caches_of(30), 30)))
    *_, imported = import_arrays(export(snapshot), like, num_tokens, None)
    for one in (snapshot, imported):
        assert one is not None
        restored = caches_of(0)
        restore(one, restored, num_tokens)
        assert [cache.offset for cache in restored] == [num_tokens, num_tokens - 1]
        for found, expected in zip(last_tokens(restored[1]), last_tokens(row[1]), strict=True):
            assert mx.array_equal(found, expected).item()


def test_arrays_that_do_not_fit_are_refused_by_name(runner, request_):
    first, second = taken(runner, request_, 10, 20)
    exported = runner.export_snapshot(second)
    with pytest.raises(ValueError, match=r"attention\.0\.keys"):
        list(runner.import_snapshot(dict(exported), 20, None))  # not behind its parent
    with pytest.raises(ValueError, match=r"recurrent\.0\.0: expected .* found nothing"):
        list(runner.import_snapshot({k: v for k, v in exported.items() if k != "recurrent.0.0"}, 20, first.segment))
    with pytest.raises(ValueError, match="does not have: more"):
        list(runner.import_snapshot({**exported, "more": np.zeros(1, np.float32)}, 20, first.segment))
    with pytest.raises(ValueError, match="float64"):
        list(runner.import_snapshot({**exported, "hidden": exported["hidden"].astype(np.float64)}, 20, first.segment))


@pytest.mark.parametrize("where", ["keys", "values", "recurrent"])
def test_a_state_that_is_not_finite_gives_no_snapshot(runner, request_, where):
    row = Row(replace(request_, request_id="nan"))
    runner.prefill([row], 10)
    assert runner.snapshot([row], None) is not None
    cache = runner._prompts[row.id].cache
    if where == "recurrent":
        layer = next(layer for layer in cache if hasattr(layer, "cache"))
        layer.cache = [layer.cache[0], layer.cache[1] * mx.array(float("nan"))]
    else:
        layer = next(layer for layer in cache if hasattr(layer, "keys"))
        setattr(layer, where, getattr(layer, where) * mx.array(float("inf")))
    assert runner.snapshot([row], None) is None
    runner.drop([row.id])


def test_images_in_front_of_a_snapshot_are_not_encoded_again(drive, runner, make_request, picture, monkeypatch):
    red, blue = picture("red"), picture("blue", "square")
    both = make_request("both", "What is in the images?", (red, blue), max_tokens=8, stops=False)
    behind_first = int(np.flatnonzero(both.token_ids == runner.image_token_id)[red.num_tokens - 1]) + 2
    cached = replace(both, boundaries=(Boundary("system", behind_first),))
    driver = drive()
    cold = driver.run({0: [cached]})["both"]
    seen: list[str] = []
    begin = runner._vision.begin
    monkeypatch.setattr(runner._vision, "begin", lambda image: seen.append(image.content_hash) or begin(image))
    green = picture("green")
    other = replace(
        make_request("other", "What is in the images?", (red, green), max_tokens=8, stops=False),
        boundaries=cached.boundaries,
    )
    warm = driver.run({0: [replace(cached, request_id="again"), other]})
    assert warm["again"] == cold
    assert driver.chunks["other"][0].num_cached == behind_first
    assert seen == [green.content_hash]
    assert (
        warm["other"]
        == drive(EngineConfig.model_validate({"prefix_cache": {"enabled": False}})).run({0: [other]})["other"]
    )
