"""The real runner against an independent reference, and under faults that are put into it."""

from dataclasses import replace

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.row import Row
from engine.core.runner import PLAIN
from engine.protocol import EngineRequest, FinishReason
from engine.worker import decode, warm_up
from engine.worker.kv_layer import BatchKVLayer
from engine.worker.model_runner import MLXRunner, load_runner
from engine.worker.recurrent_layer import BatchRecurrentLayer
from engine.worker.sampler import Sampler
from tests.support.driver import encode_images

STORY = "Tell me a story."


def reference(runner: MLXRunner, request: EngineRequest) -> list[int]:
    """The whole sequence anew for every token: no cache, no chunks, no batch, positions by the library."""
    lm = runner._model.module.language_model
    ids = request.token_ids.tolist()
    for position in range(request.sampling.max_tokens):
        tokens = mx.array([ids], mx.int32)
        grids = mx.array([image.grid_thw for image in request.images], mx.int32) if request.images else None
        positions, _ = lm.get_rope_index(tokens, grids)
        embeds = lm.model.embed_tokens(tokens)
        if request.images:
            assert runner._vision is not None
            features = mx.concatenate([runner._vision.encode(image) for image in request.images])
            where = np.flatnonzero(np.array(ids) == runner._model.config["image_token_id"])
            embeds[0, mx.array(where)] = features
        logits = lm(tokens, inputs_embeds=embeds, position_ids=positions).logits[:, -1]
        sampler = Sampler([request.sampling])
        noise = sampler.noise(mx.array([[position]]), logits.shape[-1])
        ids.append(int(np.array(sampler(logits[:, None], noise))[0, 0]))
    return ids[len(request.token_ids) :]


@pytest.fixture(scope="module")
def requests(make_request, picture) -> list[EngineRequest]:
    red, blue, wide = picture("red"), picture("blue", "square", (160, 96)), picture("green", size=(256, 96))
    return [
        make_request("text", STORY, max_tokens=8, stops=False),
        make_request("picture", "What is in the image?", (red,), max_tokens=8, stops=False),
        make_request("three", "What is in the images?", (red, wide, blue), max_tokens=6, stops=False),
        make_request("hot", STORY, max_tokens=10, stops=False, temperature=3.0, seed=9, top_p=0.95, top_k=400),
        make_request(
            "hot picture", "What is in the image?", (wide,), max_tokens=16, stops=False, temperature=4.0, seed=8
        ),
        replace(make_request("one token", "x", max_tokens=6, stops=False), token_ids=np.array([500], np.int32)),
    ]


def test_the_engine_gives_the_tokens_of_one_forward_over_the_whole_sequence(runner, drive, requests):
    expected = {request.request_id: reference(runner, request) for request in requests}
    config = EngineConfig(prefill_chunk_tokens=33, prefill_chunk_tokens_busy=17)
    assert drive(config).run({2 * i: [request] for i, request in enumerate(requests)}) == expected


def test_an_answer_starts_at_the_position_after_the_largest_of_its_prompt(runner, requests):
    """A picture takes as many positions as its longer side has tokens, fewer than it has tokens."""
    for request in requests:
        prompt = runner._prefill.begin(Row(request))
        assert prompt.next_position == prompt.positions.max() + 1
        assert (prompt.next_position < len(request.token_ids)) == bool(request.images)


@pytest.mark.parametrize("size", [1, 7, -1, 0, 1000])
def test_a_prompt_may_be_cut_into_chunks_anywhere_even_inside_an_image(runner, requests, size):
    """size: of the chunks; 0 and less are relative to the length of the prompt."""
    request = requests[1]
    first = reference(runner, replace(request, sampling=replace(request.sampling, max_tokens=1)))[0]
    work = Row(replace(request, request_id="cut"))
    chunk = size if size > 0 else work.num_tokens + size
    encode_images(runner, work)
    outputs = [runner.prefill([work], chunk)]
    while outputs[-1].first is None:
        outputs.append(runner.prefill([work], chunk))
    runner.drop([work.id])
    assert outputs[-1].first[work.id].token_ids == (first,)
    assert sum(output.num_tokens for output in outputs) == work.num_tokens


@pytest.mark.parametrize("layer", [0, 2, 4, 7])
def test_a_join_that_fails_half_way_leaves_the_running_rows_exact(drive, requests, monkeypatch, layer):
    row = replace(requests[0], sampling=replace(requests[0].sampling, max_tokens=20))
    alone = drive().run({0: [row]})["text"]
    driver = drive(EngineConfig(prompt_lookup="off"))
    driver.core.add_request(row)
    while len(driver.tokens["text"]) < 3:
        driver.core.step()
    _fail_at(monkeypatch, "append", layer)
    driver.core.add_request(requests[1])
    while "picture" not in driver.finish:
        driver.core.step()
    monkeypatch.undo()
    assert driver.run({0: []})["text"] == alone
    assert driver.finish["picture"] is FinishReason.ERROR and driver.finish["text"] is FinishReason.LENGTH


def test_a_failed_removal_of_a_row_fails_the_remaining_rows_and_frees_their_memory(
    runner, drive, requests, monkeypatch
):
    driver = drive()
    driver.core.add_request(replace(requests[0], sampling=replace(requests[0].sampling, max_tokens=50)))
    driver.core.add_request(requests[3])
    for _ in range(5):
        driver.core.step()
    _fail_at(monkeypatch, "select", 3)
    driver.core.abort("hot")
    driver.core.step()
    monkeypatch.undo()
    assert driver.finish == {"text": FinishReason.ERROR}
    assert runner.memory()["decode_cache_bytes"] == 0
    assert len(drive().run({0: [requests[0]]})["text"]) == 8, "the runner lives on"


def _fail_at(monkeypatch: pytest.MonkeyPatch, method: str, layer: int) -> None:
    """Lets the method of the layers' caches raise when it is called for this layer of the batch."""
    calls = iter(range(1000))
    for kind in (BatchRecurrentLayer, BatchKVLayer):
        original = getattr(kind, method)

        def failing(self, *args, original=original):
            if next(calls) == layer:
                raise RuntimeError("out of memory")
            return original(self, *args)

        monkeypatch.setattr(kind, method, failing)


def test_a_failed_step_fails_its_rows_and_frees_their_memory(runner, drive, requests, monkeypatch):
    driver = drive()
    driver.core.add_request(requests[0])
    while not driver.core.scheduler.num_decoding:
        driver.core.step()
    monkeypatch.setattr(runner._language_model, "decode", lambda *args: 1 / 0)
    driver.core.step()
    monkeypatch.undo()
    assert driver.finish == {"text": FinishReason.ERROR} and driver.errors["text"] == (
        "decode step failed: ZeroDivisionError"
    )
    assert runner.memory()["decode_cache_bytes"] == 0


def test_a_failed_prompt_frees_its_memory(runner, drive, requests, monkeypatch):
    driver = drive(EngineConfig(prefill_chunk_tokens=16))
    driver.core.add_request(requests[2])
    for _ in range(4):  # three pictures, then the first chunk
        driver.core.step()
    assert runner.memory()["prefill_cache_bytes"] > 0
    monkeypatch.setattr(runner._language_model, "_hidden", lambda *args, **kwargs: 1 / 0)
    driver.core.step()
    monkeypatch.undo()
    assert driver.finish == {"three": FinishReason.ERROR}
    assert runner.memory()["prefill_cache_bytes"] == 0


def test_logits_that_are_no_numbers_end_their_row_alone(runner, drive, requests, monkeypatch):
    alone = drive().run({0: [requests[0]]})["text"]
    driver = drive()
    driver.core.add_request(requests[0])
    driver.core.add_request(requests[3])
    for _ in range(2):
        driver.core.step()
    original = runner._language_model.decode
    poison = mx.array([[[0.0]], [[float("nan")]]])

    def poisoned(*args):
        logits, hidden = original(*args)
        return logits + poison, hidden

    monkeypatch.setattr(runner._language_model, "decode", poisoned)
    driver.core.step()
    monkeypatch.undo()
    assert driver.run({0: []})["text"] == alone
    assert driver.finish["hot"] is FinishReason.ERROR and driver.errors["hot"] == "the highest logit is not finite"


def test_lazy_bookkeeping_is_computed_every_64_steps(runner, drive, requests, monkeypatch):
    at: list[int] = []
    driver = drive(EngineConfig(mtp="off", prompt_lookup="off"))
    driver.core.add_request(replace(requests[0], sampling=replace(requests[0].sampling, max_tokens=200)))
    driver.core.step()
    monkeypatch.setattr(decode.mx, "eval", lambda *args, original=mx.eval: at.append(1) or original(*args))
    for _ in range(180):
        driver.core.step()
    monkeypatch.undo()
    driver.run({0: []})
    assert 2 <= len(at) < 10, "neither in every step nor never"


@pytest.mark.parametrize(("max_running", "sizes"), [(32, (1, 2, 8)), (7, (1, 2))])
def test_warm_up_times_steps_of_several_batch_sizes_and_frees_their_memory(tiny_model, max_running, sizes, monkeypatch):
    shares: list[float] = []
    used: list[str] = []
    for name, original in (("restore", MLXRunner.restore), ("snapshot_row", MLXRunner.snapshot_row)):

        def noted(*args, name=name, original=original):
            used.append(name)
            return original(*args)

        monkeypatch.setattr(MLXRunner, name, noted)
    path = tiny_model(layers=2, interval=2, agree=0.3)
    runner = load_runner(EngineConfig(model=str(path), max_running=max_running), shares.append)
    assert used == ["restore", "snapshot_row"], "as the first answers do"
    warming = shares[shares.index(1.0) + 1 :]
    assert warming[0] == 0 and warming[-1] == 1 and sorted(warming) == warming and len(set(warming)) > len(sizes) + 3
    shapes = [(step.num_rows, step.drafts) for step in runner.step_times]
    assert shapes == [(num_rows, drafts) for num_rows in sizes for drafts in (PLAIN, *runner.drafts)]
    assert all(step.seconds > 0 for step in runner.step_times)
    assert runner.snapshot_s == 0, "what a CPU caches does not depend on a measurement"
    assert warm_up.snapshot_s(runner) > 0
    assert runner.memory()["decode_cache_bytes"] == runner.memory()["prefill_cache_bytes"] == 0
