"""Images of every supported family: the engine answers as mlx_vlm does without any state, from the same pixels.

ORCHARD_FAMILIES=qwen3_vl,gemma3 runs only these.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from mlx_vlm.utils import load_model
from PIL import Image

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.processing.images import ImagePreprocessor
from engine.processing.media import frames_of
from engine.processing.message import text_part, video_part
from engine.processing.tokenizer import ChatTokenizer
from engine.processing.video_grid import CutVideo, VideoGrid
from engine.processing.vision_families import GEMMA3
from engine.protocol import EngineRequest, ImagePatches, SamplingParams
from engine.worker import loader
from engine.worker.model_runner import MLXRunner, load_runner
from tests.support.cold_runner import load_cold
from tests.support.driver import Driver, fix_prefill_costs
from tests.support.night import some_at_night
from tests.support.sighted_family import IDS
from tests.support.vision_families import SIGHTED, video_pixels
from tests.support.vision_zoo import bytes_between_pieces, image, make, reference
from tests.support.zoo import Greedy

LOGPROB_TOLERANCE = 1e-3
MIN_MARGIN = 0.02  # of the logprobs of the two best tokens: what rounds otherwise must not become another token
NUM_TOKENS = 6
NO_CACHE = {"prefix_cache": {"enabled": False}}
TINY_BOUNDARIES = {"prefix_cache": {"min_tokens": 1}}

WIDE, TALL, LIKE_WIDE = image(64, 40, seed=1), image(33, 64, seed=2), image(64, 40, seed=3)
"""WIDE and LIKE_WIDE have the same size."""
CONTENTS: dict[str, list[str | Image.Image]] = {
    "one": ["See ", WIDE, " and say what it is."],
    "two": [TALL, "Compare ", WIDE, " with it"],
    "like one": ["See ", LIKE_WIDE, " and say what it is."],
    "text": ["Just tell a story about the sea."],
}

_chosen = os.environ.get("ORCHARD_FAMILIES", "")
CHOSEN = tuple(name for name in SIGHTED if not _chosen or name in _chosen.split(","))

LIKE_OTHERS = {
    *("smolvlm", "glm4v_moe", "qwen3_vl_moe", "lfm2-vl", "internvl_chat", "paligemma with gemma2"),
    *("deepseekocr", "deepseekocr_2", "phi3_v"),
}
"""Families whose tower, image grid and rope positions are those of idefics3, glm4v, qwen3_vl, lfm2_vl, internvl and
paligemma (test_paligemma.py has both language models); and those whose smallest image has hundreds of tokens of a wide
tower, which take seconds: test_view_towers.py and test_phi3v_tower.py have their features and tokens."""
WARM = {
    *("gemma3", "pixtral", "llava_next", "molmo2", "lfm2_vl", "idefics3", "internvl"),
    *("paddleocr_vl", "qwen2_5_vl", "qwen3_vl"),
}
"""Families whose memory the gate measures: those with grids of each kind, and with windows."""

every_family = some_at_night(
    CHOSEN, set(CHOSEN) - LIKE_OTHERS, "the gate has a family with the same tower, or a file of its own for the tower"
)
measured = pytest.mark.parametrize(
    "sighted",
    some_at_night(CHOSEN, WARM, "the gate measures the memory of a tower with grids of each kind"),
    indirect=True,
    scope="module",
)


@dataclass(frozen=True)
class Sighted:
    """A family's runner, and the answers that it must give."""

    runner: MLXRunner
    requests: dict[str, EngineRequest]
    answers: dict[str, Greedy]
    module: Any
    tokenizer: ChatTokenizer
    video_grid: VideoGrid | None

    def about_video(self, name: str, frames: list[Image.Image]) -> tuple[EngineRequest, Greedy]:
        """Return a request about a video of two frames per second, and the library's answer."""
        grid = self.video_grid
        assert grid is not None
        width, height = grid.target_size(len(frames), *frames[0].size)
        resized = [frame.resize((width, height), resample=grid.resample) for frame in frames]
        patches, hashes = grid.cut(resized)
        times_s = tuple(grid.times_s(list(range(len(frames))), fps=2))
        cut = CutVideo(patches, (height // grid.patch_size, width // grid.patch_size), times_s, tuple(hashes))
        messages = [{"role": "user", "content": [text_part("Watch "), video_part(""), text_part(" to the end.")]}]
        request = request_of(name, messages, frames_of(cut, 0, grid), self.tokenizer)
        ids = np.where(request.token_ids == IDS["<image>"], IDS["<video>"], request.token_ids)
        return request, reference(self.module, ids.tolist(), video_pixels(frames), NUM_TOKENS)

    def check(self, driver: Driver, *names: str) -> None:
        """Assert that the driver has the answers of these requests."""
        for name in names:
            assert driver.errors[name] is None
            assert driver.tokens[name] == self.answers[name].tokens
            logprobs = [one.logprob for chunk in driver.chunks[name] for one in chunk.logprobs]
            np.testing.assert_allclose(logprobs, self.answers[name].logprobs, atol=LOGPROB_TOLERANCE)


def messages_of(content: Sequence[str | Image.Image]) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content]
    return [{"role": "user", "content": parts}]


def request_of(request_id: str, messages: Any, images: tuple[ImagePatches, ...], tokenizer: Any) -> EngineRequest:
    placeholders = tokenizer.placeholders(images)
    prompt = tokenizer.chat_prompt(messages, template_kwargs={}, placeholders=placeholders)
    sampling = SamplingParams(NUM_TOKENS, temperature=0.0, logprobs=0)
    return EngineRequest(request_id, prompt.token_ids, sampling, (), images, boundaries=prompt.boundaries)


@pytest.fixture(scope="module", params=every_family)
def sighted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sighted:
    """Runners are never closed: that would take the main thread's streams from the tests that follow.

    The gate warms up the families of WARM, the night all.
    """
    family = SIGHTED[request.param]
    is_warm = request.config.option.night or request.param in WARM
    path = make(tmp_path_factory.mktemp("zoo") / "model", family)
    with family.built():
        preprocessor, tokenizer, module = ImagePreprocessor(path), ChatTokenizer(path), load_model(path)
    requests, answers = {}, {}
    for name, content in CONTENTS.items():
        pictures = [part for part in content if not isinstance(part, str)]
        patches = tuple(preprocessor.patches(one) for one in pictures)
        requests[name] = request_of(name, messages_of(content), patches, tokenizer)
        pixels = family.pixels(pictures) if pictures else {}
        answers[name] = reference(module, requests[name].token_ids.tolist(), pixels, NUM_TOKENS, family)
    # the next turn of the conversation "one"
    said = tokenizer.decode(answers["one"].tokens)
    messages = [*messages_of(CONTENTS["one"]), {"role": "assistant", "content": said}]
    messages += [{"role": "user", "content": "Are you sure?"}]
    requests["next"] = request_of("next", messages, requests["one"].images, tokenizer)
    ids = requests["next"].token_ids.tolist()
    answers["next"] = reference(module, ids, family.pixels([WIDE]), NUM_TOKENS, family)
    with family.built():
        config = EngineConfig(model=str(path))
        runner = load_runner(config, lambda progress: None) if is_warm else load_cold(config)
    return Sighted(runner, requests, answers, module, tokenizer, preprocessor.video_grid)


@pytest.mark.parametrize("chunk", some_at_night([23, 2048], [23], "the gate has prompts in several chunks"))
def test_request_alone_gets_the_tokens_of_the_library_in_chunks_of_any_size(sighted, chunk):
    """chunk: most prompt tokens per step."""
    for name in ("one", "two", "text"):
        driver = Driver(sighted.runner, EngineConfig.model_validate({"prefill_chunk_tokens": chunk, **NO_CACHE}))
        driver.run({0: [sighted.requests[name]]})
        sighted.check(driver, name)


def test_chunk_that_would_end_inside_an_image_gives_the_tokens_of_the_library(sighted, monkeypatch):
    """Where attention among the tokens of an image is causal, a chunk needs none of the image's tokens after it.

    Where it is not, no chunk divides a run of them: it ends before the run, unless it begins with it.
    """
    runner, request, sizes = sighted.runner, sighted.requests["two"], []
    is_image = request.token_ids == runner.image_token_id
    chunk, prefill = int(np.flatnonzero(is_image)[-1]), runner.prefill
    monkeypatch.setattr(runner, "prefill", lambda rows, most: (sizes.append(most), prefill(rows, most))[1])
    config = EngineConfig.model_validate({"prefill_chunk_tokens": chunk, **NO_CACHE})
    driver = Driver(runner, config)
    fix_prefill_costs(driver.core, 0.0, 0.0)  # or a step may be too short for the whole chunk
    driver.run({0: [request]})
    assert is_image[chunk - 1] and is_image[chunk]
    if runner.whole_prompts is not None:
        assert sizes == [len(is_image)]
    elif runner.whole_images:
        ends = np.cumsum(sizes)[:-1]
        assert 0 < ends[0] < chunk and not any(is_image[end - 1] and is_image[end] for end in ends)
    else:
        assert sizes[0] == chunk
    sighted.check(driver, "two")


def test_requests_with_images_get_the_same_tokens_in_a_batch_with_texts(sighted):
    driver = Driver(sighted.runner, EngineConfig.model_validate({"prefill_chunk_tokens_busy": 16, **NO_CACHE}))
    arrivals = {0: ["text"], 2: ["one", "two"], 5: ["like one"]}
    driver.run({step: [sighted.requests[name] for name in names] for step, names in arrivals.items()})
    sighted.check(driver, "text", "one", "two", "like one")


def test_conversation_continues_behind_its_image_from_the_prefix_cache(sighted):
    driver = Driver(sighted.runner, EngineConfig.model_validate(TINY_BOUNDARIES))
    for name in ("one", "next"):
        driver.run({0: [sighted.requests[name]]})
    sighted.check(driver, "one", "next")
    if sighted.runner.whole_prompts is not None:
        assert driver.chunks["next"][0].num_cached == 0
        return
    behind_image = np.flatnonzero(sighted.requests["next"].token_ids == sighted.runner.image_token_id)[-1] + 1
    assert driver.chunks["next"][0].num_cached >= behind_image


def test_video_gets_the_tokens_of_the_library_and_is_cached_by_its_frames(sighted):
    """The library sees video tokens and all frames at once, the engine image tokens and groups of two frames."""
    if sighted.video_grid is None:
        return
    requests, answers = {}, {}
    for name, seeds in {"video": range(5), "other video": (0, 1, 2, 9, 4)}.items():
        frames = [image(48, 40, seed=seed) for seed in seeds]
        requests[name], answers[name] = sighted.about_video(name, frames)
    driver = Driver(sighted.runner, EngineConfig.model_validate({**TINY_BOUNDARIES, "prefill_chunk_tokens": 23}))
    for name in ("video", "other video"):
        driver.run({0: [requests[name]], 1: [replace(sighted.requests["one"], request_id=f"{name}, image")]})
    replace(sighted, requests=requests, answers=answers).check(driver, "video", "other video")
    assert driver.tokens["video, image"] == sighted.answers["one"].tokens


def test_another_image_of_the_same_size_is_not_answered_from_the_prefix_cache(sighted):
    assert np.array_equal(sighted.requests["one"].token_ids, sighted.requests["like one"].token_ids)
    driver = Driver(sighted.runner, EngineConfig.model_validate(TINY_BOUNDARIES))
    for name in ("one", "like one"):
        driver.run({0: [sighted.requests[name]]})
    sighted.check(driver, "one", "like one")
    before_image = np.flatnonzero(sighted.requests["one"].token_ids == sighted.runner.image_token_id)[0]
    assert driver.chunks["like one"][0].num_cached <= before_image


def test_images_change_answers_that_are_never_nearly_another(sighted):
    """Otherwise the other tests of this file would tell nothing."""
    one, other = (sighted.answers[name] for name in ("one", "like one"))
    assert np.abs(one.logprobs[0] - other.logprobs[0]) > 2 * LOGPROB_TOLERANCE
    assert min(answer.margin for answer in sighted.answers.values()) > MIN_MARGIN


def test_features_of_pieces_are_bit_for_bit_those_of_one_piece(sighted):
    vision = sighted.runner._vision
    for one in sighted.requests["two"].images:
        vision.clear()
        encoding = vision.begin(one)
        while encoding.features is None:
            vision.advance(encoding, 1)
        vision.clear()
        assert np.array_equal(np.array(encoding.features), np.array(vision.encode(one)))


@measured
def test_memory_of_an_image_is_reserved(sighted):
    """The peak itself is not compared: on a CPU it depends on how far the device is behind."""
    vision, costs = sighted.runner._vision, sighted.runner.costs
    assert costs.image(1) > 0
    sizes = [costs.image(height * width * tiles) for tiles, height, width in vision.probe_grids]
    assert sizes == sorted(set(sizes)), "larger images take more"
    for one in sighted.requests["two"].images:
        features = vision.encode(one)
        assert features.shape[0] == one.num_tokens
        assert 2 * features.nbytes <= costs.image_token_bytes * one.num_tokens


@measured
def test_memory_between_the_pieces_of_an_image_is_reserved(sighted):
    vision, costs = sighted.runner._vision, sighted.runner.costs
    for one in sighted.requests["two"].images:
        vision.clear()
        assert max(bytes_between_pieces(vision, one), default=0) <= costs.kept_image(len(one.patches), one.num_tokens)


def test_rows_with_images_leave_no_memory_behind(sighted):
    memory = sighted.runner.memory()
    assert memory["decode_cache_bytes"] == memory["prefill_cache_bytes"] == 0


def test_states_that_were_computed_with_other_masks_are_of_another_model(tmp_path, monkeypatch):
    """Snapshots on disk may come from a version without these masks."""
    config = EngineConfig(model=str(make(tmp_path / "model", SIGHTED["gemma3"])))
    with_own_masks = load_cold(config).fingerprint
    monkeypatch.setattr(loader, "vision_family", lambda config: replace(GEMMA3, both_ways=lambda config: frozenset()))
    assert load_cold(config).fingerprint != with_own_masks
