"""Checkpoints that are loaded, and those that are refused before the library sees them."""

import json
import shutil
from pathlib import Path

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import pytest
from mlx_vlm.convert import convert
from PIL import Image

from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.processing.images import ImagePreprocessor
from engine.processing.tokenizer import ChatTokenizer
from engine.worker import devices, loader
from engine.worker.patches import recurrent_gemma_norm
from engine.worker.vision import VisionEncoder
from engine.worker.vision_towers import make_tower
from tests.support.cold_runner import load_cold
from tests.support.families import FAMILIES
from tests.support.families.family import SIZES
from tests.support.tiny import Tiny, build
from tests.support.zoo import make

DEMO = Path(loader.__file__).parents[1] / "demo_model"


def load(**config) -> tuple[loader.LoadedModel, list[float]]:
    progress: list[float] = []
    return loader.load(EngineConfig(**config), progress.append), progress


def test_weights_on_the_cpu_are_all_float32_and_progress_ends_at_one():
    model, progress = load()
    dtypes = {w.dtype for _, w in loader.weights_of(model.module)}
    assert dtypes == {mx.float32} and model.dtype == "float32"
    assert progress[-1] == 1.0 and progress == sorted(progress)
    assert model.media_kinds == {"image", "video"} and model.max_context_tokens == 32768
    assert model.proposers["mtp"].module is not None
    weights = [w for module in (model.module, model.proposers["mtp"].module) for _, w in loader.weights_of(module)]
    assert {w.dtype for w in weights} == {mx.float32} and model.num_weight_bytes == sum(w.nbytes for w in weights)


def test_progress_grows_piece_by_piece_through_model_and_head(monkeypatch):
    monkeypatch.setattr(loader, "EVAL_BYTES", 2**20)
    model, progress = load()
    assert progress == sorted(progress) and progress[-1] == 1.0 and len(progress) > 10
    assert model.proposers["mtp"].status == "ready"


def test_a_requested_dtype_is_used_but_decays_stay_float32():
    model, _ = load(dtype="bfloat16")
    dtypes = {name: w.dtype for name, w in loader.weights_of(model.module)}
    assert dtypes["language_model.model.embed_tokens.weight"] == mx.bfloat16
    assert {d for name, d in dtypes.items() if name.endswith("A_log")} == {mx.float32}


def test_a_text_model_has_no_media_kinds():
    model, _ = load(model=str(DEMO / "draft"))
    assert model.media_kinds == frozenset()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for file in DEMO.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    return tmp_path


@pytest.mark.parametrize(("file", "key"), [("config.json", "model_file"), ("tokenizer_config.json", "auto_map")])
def test_code_in_a_checkpoint_is_refused_and_never_run(copy, file, key):
    config = json.loads((copy / file).read_text())
    config[key] = "evil.py"
    (copy / file).write_text(json.dumps(config))
    (copy / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(EngineFailed, match=key):
        load(model=str(copy))


def test_broken_weights_end_with_the_reason(copy):
    (copy / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(EngineFailed, match="could not be loaded"):
        load(model=str(copy))


def test_missing_weights_end_with_the_reason(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(EngineFailed, match="safetensors"):
        load(model=str(copy))


def test_a_context_beyond_the_models_own_is_refused_with_both_numbers():
    with pytest.raises(EngineFailed, match=r"40000.*32768"):
        load(max_context_tokens=40000)


@pytest.mark.skipif(devices.has_gpu(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(EngineFailed, match="GPU"):
        load(device="gpu")


def test_a_quantized_checkpoint_answers_questions_on_text_and_images(tmp_path, drive, make_request, picture, tokenizer):
    convert(str(DEMO), str(tmp_path / "q8"), quantize=True, q_bits=8, q_group_size=64)
    runner = load_cold(EngineConfig(model=str(tmp_path / "q8")))
    requests = [
        make_request("sum", "What is 12 + 30?"),
        make_request("red", "What is in the image?", (picture("red"),)),
    ]
    tokens = drive(on=runner).run({0: requests})
    assert tokenizer.detokenizer(()).push(tokens["sum"]) == "12 + 30 = 42"
    assert "red circle" in tokenizer.detokenizer(()).push(tokens["red"])
    assert runner.capabilities["dtype"] == "float32"


@pytest.mark.parametrize("choices", [{}, {"mtp": False}, {"tie": True, "agree": 0.3}, {"layers": 2, "interval": 2}])
def test_tiny_checkpoints_load_with_vision_tower_and_head(tiny_model, choices):
    model, _ = load(model=str(tiny_model(**choices)))
    assert model.media_kinds == {"image"} and model.vocab_size == 512
    assert (model.proposers["mtp"].module is not None) == choices.get("mtp", True)
    preprocessor, tokenizer = ImagePreprocessor(model.path), ChatTokenizer(model.path)
    image = preprocessor.patches(Image.new("RGB", (48, 32), "red"))
    features = VisionEncoder(make_tower(model.module, "qwen3_5"), preprocessor.normalization, 0).encode(image)
    assert features.shape == (image.num_tokens, 64) and mx.isfinite(features).all().item()
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    ids = tokenizer.encode_chat(
        [{"role": "user", "content": content}], template_kwargs={}, placeholders=[tokenizer.placeholder(image)]
    )
    assert list(ids).count(model.config["image_token_id"]) == image.num_tokens and tokenizer.stop_token_ids == (2,)


def test_a_tiny_checkpoint_is_reproducible_and_differs_with_the_seed(tmp_path):
    files = [
        build(tmp_path / name, Tiny(seed=seed)) / "model.safetensors" for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    a, b, c = (file.read_bytes() for file in files)
    assert a == b != c


def test_models_are_built_with_the_patches_of_what_they_are_built_of(tmp_path, monkeypatch):
    """The library's own method stands for a process that has loaded no model before."""
    path = make(tmp_path / "model", FAMILIES["recurrent_gemma"])
    monkeypatch.setattr(recurrent_gemma_norm.Griffin, "__init__", recurrent_gemma_norm._library_init)
    layers = loader.open_model(EngineConfig(model=str(path), device="cpu")).module.language_model.model.layers
    assert {layer.temporal_pre_norm.eps for layer in layers} == {SIZES["rms_norm_eps"]} != {1e-5}
