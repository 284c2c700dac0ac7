"""Checks of a model before a replica loads it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.args import AppArgs
from deployments.model_checks import check_model
from engine.demo import DEMO_MODEL
from engine.errors import EngineFailed

DRAFT = DEMO_MODEL / "draft"  # reads text alone


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo's draft, to be damaged."""
    return Path(shutil.copytree(DRAFT, tmp_path / "model"))


def refusal(**sections: Any) -> str:
    with pytest.raises(EngineFailed) as error:
        check_model(AppArgs.model_validate(sections))
    return str(error.value)


def test_demo_model_and_its_draft_pass_the_check(model: Path):
    check_model(AppArgs())
    check_model(AppArgs.model_validate({"engine": {"model": str(model)}}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def no_header(path: Path) -> None:
    path.write_bytes(b"no weights")


def no_json(path: Path) -> None:
    path.write_bytes((4).to_bytes(8, "little") + b"{{{{")


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "its header declares"),
        (no_header, "this is not a readable safetensors file (the header length is"),
        (no_json, "this is not a readable safetensors file"),
        (empty, "this is not a readable safetensors file"),
        (Path.unlink, "there are no weights"),
    ],
)
def test_unreadable_weights_are_named_with_the_reason(model: Path, damage: Callable[[Path], None], reason: str):
    damage(model / "model.safetensors")
    refused = refusal(engine={"model": str(model)})
    assert reason in refused and str(model) in refused


def test_missing_weight_file_of_the_index_is_named(model: Path):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused = refusal(engine={"model": str(model)})
    assert "names 1 files that are missing, such as model-00002-of-00002.safetensors" in refused
    (model / "model.safetensors.index.json").write_text("{}")
    assert "weight_map" in refusal(engine={"model": str(model)})


def test_context_beyond_that_of_the_model_is_refused():
    assert "max_context_tokens is 99999999; the model's limit is" in refusal(engine={"max_context_tokens": 99_999_999})


def test_options_for_images_have_no_effect_with_a_model_that_reads_text(model: Path):
    engine = {"model": str(model), "vision_cache_mb": 1, "image_memory_mb": 64}
    refused = refusal(engine=engine, media={"max_images": 2, "max_bytes": 2048})
    options = "media.max_images, media.max_bytes, engine.vision_cache_mb, engine.image_memory_mb"
    assert refused.startswith(f"{options}: has no effect")
    check_model(AppArgs.model_validate({"engine": {"model": str(model), "image_memory_mb": 1024}}))
    check_model(AppArgs.model_validate({"engine": {"model": str(model)}, "media": {"max_images": 16}}))
    check_model(AppArgs.model_validate({"media": {"max_images": 2}}))


IN_PLACE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


def test_a_system_policy_has_no_effect_where_the_template_takes_late_system_messages(model: Path):
    """As Qwen's do not; a template that writes every message where it stands."""
    asked = {"engine": {"model": str(model)}, "http": {"system_policy": "inline"}}
    (model / "chat_template.jinja").write_text(IN_PLACE)
    assert refusal(**asked).startswith("http.system_policy: 'inline' has no effect")
    check_model(AppArgs.model_validate({**asked, "http": {"system_policy": "hoist"}}))


def test_a_system_policy_is_honoured_where_the_template_refuses_late_system_messages(model: Path):
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    )
    (model / "chat_template.jinja").write_text(IN_PLACE.replace("{% for m in messages %}", strict))
    check_model(AppArgs.model_validate({"engine": {"model": str(model)}, "http": {"system_policy": "inline"}}))


def test_draft_model_of_the_demo_passes_the_check():
    check_model(AppArgs.model_validate({"engine": {"draft_model": {"model": "demo"}}}))


def test_draft_model_that_cannot_be_read_is_refused(model: Path):
    missing = str(model / "nowhere")
    assert f"engine.draft_model {missing!r}: " in refusal(engine={"draft_model": {"model": missing}})
    (model / "model.safetensors").unlink()
    refused = refusal(engine={"draft_model": {"model": str(model)}})
    assert refused.startswith(f"engine.draft_model {str(model)!r}: ") and "there are no weights" in refused


def test_draft_model_with_another_tokenizer_is_refused(model: Path):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokens = tokenizer["model"]["vocab"]
    one, other = [token for token in tokens if len(token) == 1][:2]
    tokens[one], tokens[other] = tokens[other], tokens[one]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has another tokenizer than the model: " in refusal(engine={"draft_model": {"model": str(model)}})
