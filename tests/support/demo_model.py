"""Fixtures of all tests: the demo model's runner, loaded once, requests for it, and tiny checkpoints, built once.

MLX and the tokenizers are imported by the first test that uses such a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image, ImageDraw

from engine.config import EngineConfig
from engine.protocol import EngineRequest, ImagePatches, SamplingParams

if TYPE_CHECKING:
    from engine.core.runner import ModelRunner
    from engine.processing.tokenizer import ChatTokenizer
    from engine.worker.model_runner import MLXRunner
    from tests.support.driver import Driver
    from tests.support.tiny import Tiny

DEMO = Path(__file__).parents[2] / "engine" / "demo_model"
DRAFT = DEMO / "draft"  # a text-only model with plain attention
GREEDY = 0.0


@pytest.fixture(scope="session")
def runner() -> Iterable[MLXRunner]:
    yield from _loaded(EngineConfig())


@pytest.fixture(scope="session")
def text_runner() -> Iterable[MLXRunner]:
    yield from _loaded(EngineConfig(model=str(DRAFT)))


def _loaded(config: EngineConfig) -> Iterable[MLXRunner]:
    from tests.support.cold_runner import load_cold

    runner = load_cold(config)
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    from engine.processing.tokenizer import ChatTokenizer

    return ChatTokenizer(DEMO)


@pytest.fixture(scope="session")
def make_request(tokenizer: ChatTokenizer) -> Callable[..., EngineRequest]:
    def make(
        request_id: str,
        text: str,
        images: tuple[ImagePatches, ...] = (),
        max_tokens: int = 24,
        temperature: float = GREEDY,
        stops: bool = True,
        **sampling: float,
    ) -> EngineRequest:
        parts = [{"type": "image"} for _ in images]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        placeholders = [tokenizer.placeholder(image) for image in images]
        messages = [{"role": "user", "content": content}]
        ids = tokenizer.encode_chat(messages, template_kwargs={}, placeholders=placeholders)
        stop_token_ids = tokenizer.stop_token_ids if stops else ()
        params = SamplingParams(max_tokens, temperature, **sampling)  # type: ignore[arg-type]
        return EngineRequest(request_id, ids, params, stop_token_ids, images)

    return make


@pytest.fixture(scope="session")
def picture() -> Callable[..., ImagePatches]:
    from engine.processing.images import ImagePreprocessor

    preprocessor = ImagePreprocessor(DEMO)

    def draw(colour: str, shape: str = "circle", size: tuple[int, int] = (128, 128)) -> ImagePatches:
        image = Image.new("RGB", size, "white")
        box = (size[0] // 4, size[1] // 4, size[0] * 3 // 4, size[1] * 3 // 4)
        pen = ImageDraw.Draw(image)
        (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=colour)
        return preprocessor.patches(image)

    return draw


@pytest.fixture
def drive(runner: MLXRunner) -> Callable[..., Driver]:
    from tests.support.driver import Driver

    def make(config: EngineConfig | None = None, on: ModelRunner = runner) -> Driver:
        return Driver(on, config)

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(**of tests.support.tiny.Tiny): a random checkpoint, built once per session.

    Copy it before changing it.
    """
    from tests.support.tiny import Tiny, build

    built: dict[Tiny, Path] = {}

    def make(**choices: Any) -> Path:
        tiny = Tiny(**choices)
        if tiny not in built:
            built[tiny] = build(tmp_path_factory.mktemp("tiny") / "model", tiny)
        return built[tiny]

    return make
