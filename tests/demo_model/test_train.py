"""A tiny model is trained and exported, and the engine computes what it computes; so it does with the demo model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.demo import DEMO_MODEL
from engine.processing.images import ImagePreprocessor
from engine.processing.tokenizer import ChatTokenizer
from engine.protocol import EngineRequest, SamplingParams
from engine.worker import loader
from engine.worker.model_runner import load_runner
from tests.demo_model.batches import Batch, collate
from tests.demo_model.delta_rule import CHUNK
from tests.demo_model.encoding import cut_image, encode_sample, encode_text, make_document
from tests.demo_model.evaluate import IMAGE_TASKS, TEXT_TASKS, score
from tests.demo_model.export import checkpoint_config, export_checkpoint, load_checkpoint
from tests.demo_model.layers import LayerConfig
from tests.demo_model.model import DRAFT, PICO, ModelConfig, TrainableModel
from tests.demo_model.stages import FINAL_STAGES, STAGES, Lengths, Stage
from tests.demo_model.tasks.dense_images import one_shape
from tests.demo_model.tasks.images import number
from tests.demo_model.tasks.reasoning import sums
from tests.demo_model.tasks.sample import Sample, prompt_and_answer
from tests.demo_model.train import stage_batch, stage_batches, train
from tests.demo_model.vision import VisionConfig
from tests.demo_model.world.draws import Draws
from tests.support.driver import Driver

pytestmark = pytest.mark.night("it tests a tool of the developers, not the server")

TINY = ModelConfig(
    layers=LayerConfig(64, 128, num_heads=2, num_kv_heads=1, head_dim=32, linear_heads=2, linear_head_dim=32),
    num_layers=4,
    attention_interval=2,
    rotary_share=0.5,
    rope_sections=(4, 2, 2),
    vision=VisionConfig(depth=2, hidden_size=32, intermediate_size=64, num_heads=2),
)
TINY_DRAFT = replace(DRAFT, layers=replace(DRAFT.layers, hidden_size=64, intermediate_size=128), num_layers=2)
TINY_STAGE = Stage(
    *("tiny", TINY, ((sums, 0.6), (one_shape, 0.4))),
    steps=32,
    seed=1,
    lengths=(Lengths(0, {192: 1.0}),),
    batch_tokens=768,
    warmup_steps=4,
)
LOGIT_TOLERANCE = 1e-3
NUM_TOKENS = 12


def run(model: TrainableModel, stage: Stage) -> list[float]:
    return list(train(model, stage, stage_batches(stage)))


def assert_loss_falls(losses: list[float], factor: float) -> None:
    first, last = np.mean(losses[:4]), np.mean(losses[-4:])
    assert last < factor * first, f"the loss went from {first:.2f} to {last:.2f}"


@pytest.fixture(scope="module")
def tiny() -> tuple[TrainableModel, list[float]]:
    model = TrainableModel(TINY, seed=3)
    return model, run(model, TINY_STAGE)


@pytest.fixture(scope="module")
def tiny_checkpoint(tiny: tuple[TrainableModel, list[float]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    export_checkpoint(tiny[0], folder, mx.float32)
    return folder


@pytest.fixture(scope="module")
def drive_tiny(tiny_checkpoint: Path) -> Callable[[EngineRequest], list[int]]:
    runner = load_runner(EngineConfig(model=str(tiny_checkpoint)), lambda progress: None)
    # The runner is not closed: that ends MLX's streams on this thread, which other tests use.
    return lambda request: Driver(runner).run({0: [request]})[request.request_id]


def prompt_batch(token_ids: list[int], sample: Sample) -> tuple[Batch, int]:
    """A prompt with one token per image, as a batch of one row, and its length with the images' tokens."""
    images = tuple(cut_image(image) for image in sample.images)
    document = make_document(token_ids, [1.0] * len(token_ids), images)
    return collate([[document]], -(-document.num_tokens // CHUNK) * CHUNK), document.num_tokens


def greedy_tokens(model: TrainableModel, sample: Sample, count: int) -> list[int]:
    """Return the training model's own answer, every token computed from the beginning."""
    prompt = encode_text(prompt_and_answer(sample)[0])
    tokens: list[int] = []
    while len(tokens) < count:
        batch, length = prompt_batch(prompt + tokens, sample)
        logits = model.logits(model(batch)[0, length - 1])
        tokens.append(int(np.argmax(np.array(logits))))
    return tokens


def engine_request(folder: Path, sample: Sample) -> EngineRequest:
    images = tuple(ImagePreprocessor(folder).patches(image) for image in sample.images)
    kwargs: dict[str, Any] = {"enable_thinking": sample.thinking}
    tokenizer = ChatTokenizer(folder)
    placeholders = [tokenizer.placeholder(image) for image in images]
    token_ids = tokenizer.encode_chat(sample.messages[:-1], template_kwargs=kwargs, placeholders=placeholders)
    return EngineRequest("sample", token_ids, SamplingParams(NUM_TOKENS, temperature=0.0), (), images)


def engine_logits(folder: Path, token_ids: list[int]) -> mx.array:
    """float32 [num_tokens, vocab], by the module that the engine loads."""
    module = loader.load(EngineConfig(model=str(folder), dtype="float32", mtp="off"), lambda progress: None).module
    return module.language_model(mx.array([token_ids])).logits[0]


def assert_same_logits(model: TrainableModel, folder: Path, sample: Sample) -> None:
    token_ids = encode_text("".join(prompt_and_answer(sample)))
    batch, length = prompt_batch(token_ids, sample)
    ours, theirs = model.logits(model(batch)[0, :length]), engine_logits(folder, token_ids)
    assert mx.allclose(ours, theirs, rtol=0, atol=LOGIT_TOLERANCE)


def test_the_loss_of_a_tiny_model_falls(tiny):
    assert_loss_falls(tiny[1], factor=0.6)


@pytest.mark.parametrize("task", [sums, one_shape, number])
def test_the_engine_gives_the_tokens_of_the_trained_model(tiny, tiny_checkpoint, drive_tiny, task):
    for seed in range(3):
        sample = task(Draws(f"engine {seed}"))
        request = engine_request(tiny_checkpoint, sample)
        assert drive_tiny(request) == greedy_tokens(tiny[0], sample, NUM_TOKENS)


def test_the_engine_gives_the_logits_of_the_trained_model(tiny, tiny_checkpoint):
    assert_same_logits(tiny[0], tiny_checkpoint, sums(Draws("logits")))


def test_a_tiny_draft_is_trained_and_loaded(tmp_path):
    model = TrainableModel(TINY_DRAFT, seed=3)
    stage = replace(TINY_STAGE, model=TINY_DRAFT, mix=((sums, 1.0),), steps=20)
    assert_loss_falls(run(model, stage), factor=0.8)
    export_checkpoint(model, tmp_path, mx.float32)
    assert_same_logits(model, tmp_path, sums(Draws("logits")))


@pytest.mark.parametrize(("config", "folder"), [(PICO, DEMO_MODEL), (DRAFT, DEMO_MODEL / "draft")])
def test_demo_checkpoints_have_the_config_and_the_logits_of_the_training_code(config, folder):
    assert checkpoint_config(config) == json.loads((folder / "config.json").read_text())
    assert_same_logits(load_checkpoint(config, folder), folder, sums(Draws("logits")))


def test_exported_checkpoint_equals_the_loaded_checkpoint(tmp_path):
    export_checkpoint(load_checkpoint(PICO, DEMO_MODEL), tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {file.name for file in DEMO_MODEL.iterdir() if file.is_file()} - {"README.md"}
    ours, theirs = (mx.load(str(folder / "model.safetensors")) for folder in (tmp_path, DEMO_MODEL))
    assert isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


@pytest.mark.parametrize("name", ["sums", "tool_call", "needle in 256 tokens", "several shapes: relative", "number"])
def test_the_demo_model_is_right_in_the_tasks_it_was_trained_on(name):
    result = score(load_checkpoint(PICO, DEMO_MODEL), (TEXT_TASKS | IMAGE_TASKS)[name], num_samples=8)
    assert result.exact >= 0.75 and result.draft_shares[0] >= 0.8


def test_every_stage_has_a_stage_to_start_from_and_batches_that_fit():
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names) and set(FINAL_STAGES) <= set(names)
    for index, stage in enumerate(STAGES):
        before = [other for other in STAGES[:index] if other.name == stage.starts_from]
        assert stage.starts_from is None or [other.model for other in before] == [stage.model]
        assert max(map(stage.rate, range(stage.steps))) == pytest.approx(stage.learning_rate, rel=0.2)
        batch = stage_batch(replace(stage, batch_tokens=512, lengths=(Lengths(0, {512: 1.0}),)), stage.steps - 1)
        assert batch.token_ids.shape == (1, 512) and len(batch.spans) > 1
        assert batch.images is None or stage.model.vision is not None


def test_a_batch_depends_on_its_seed_and_step_alone():
    stage = replace(STAGES[0], batch_tokens=512, lengths=(Lengths(0, {512: 1.0}),))
    one, same, other = (stage_batch(stage, index) for index in (5, 5, 6))
    assert np.array_equal(one.token_ids, same.token_ids) and not np.array_equal(one.token_ids, other.token_ids)


def test_worker_processes_draw_the_same_batches():
    stage = replace(TINY_STAGE, steps=3)
    for here, there in zip(stage_batches(stage), stage_batches(stage, num_workers=1), strict=True):
        assert np.array_equal(here.token_ids, there.token_ids) and here.spans == there.spans


def test_documents_of_a_row_do_not_see_each_other():
    model, draws = TrainableModel(TINY, seed=3), Draws("packed")
    documents = [encode_sample(sums(draws), 0.1) for _ in range(2)]
    packed, alone = collate([documents], 4 * CHUNK), collate([documents[1:]], 2 * CHUNK)
    span = packed.spans[1]
    together, apart = model(packed)[0, span.start : span.end], model(alone)[0, : span.end - span.start]
    assert mx.allclose(together, apart, atol=1e-4)
