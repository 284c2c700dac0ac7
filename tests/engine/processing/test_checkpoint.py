"""Where a model's files are (demo, directory or hub), and checkpoints that are refused before loading."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineFailed
from engine.processing.checkpoint import DEMO_MODEL, media_kinds, read_config, refuse_code, resolve_checkpoint


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The demo model without its weights."""
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "*.md")))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def snapshot_download(repository: str, **kwargs: Any) -> str:
        calls.append({"repository": repository, **kwargs})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_demo_is_the_shipped_directory():
    assert resolve_checkpoint("demo", None, weights=True) == DEMO_MODEL
    assert read_config(DEMO_MODEL)["model_type"] == "qwen3_5"


def test_an_existing_directory_is_used_without_asking_the_hub(tmp_path: Path, hub: list):
    assert resolve_checkpoint(str(tmp_path), None, weights=True) == tmp_path
    assert not hub


def test_a_relative_directory_that_looks_like_a_hub_name_is_taken(tmp_path: Path, hub: list, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("org/name", None, weights=True) == tmp_path / "org" / "name"
    assert not hub


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/model", "~/no such model", "a/b/c", "..\\x"])
def test_a_path_that_does_not_exist_is_never_sent_to_the_hub(model: str, hub: list):
    with pytest.raises(EngineFailed, match="there is no directory"):
        resolve_checkpoint(model, None, weights=True)
    assert not hub


def test_an_empty_name_is_no_model(hub: list):
    with pytest.raises(EngineFailed, match="model is ' '; expected 'demo', 'smollm2', a directory or a hub repository"):
        resolve_checkpoint(" ", None, weights=True)
    assert not hub


def test_a_file_is_no_model(tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(EngineFailed, match="is a file; expected the directory"):
        resolve_checkpoint(str(tmp_path / "model.safetensors"), None, weights=True)


def test_a_revision_of_a_directory_is_refused():
    with pytest.raises(EngineFailed, match="revision 'main' has no effect"):
        resolve_checkpoint("demo", "main", weights=True)


def test_the_hub_is_asked_for_weights_only_when_needed(hub: list, tmp_path: Path):
    assert resolve_checkpoint("org/name", "v1", weights=False) == tmp_path
    assert resolve_checkpoint("org/name", "v1", weights=True) == tmp_path
    without, with_weights = (call["allow_patterns"] for call in hub)
    assert {"*.json", "*.jinja"} <= set(without) and "*.safetensors" not in without
    assert "*.safetensors" in with_weights
    assert not any("py" in pattern or pattern == "*" for pattern in with_weights)
    assert hub[0]["repository"] == "org/name" and hub[0]["revision"] == "v1"


def test_a_failed_hub_download_names_the_model_and_the_reason(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(EngineFailed, match=r"model 'org/name' at revision 'v1': no such directory.*offline"):
        resolve_checkpoint("org/name", "v1", weights=True)


def test_a_name_that_the_hub_does_not_allow_is_named():
    with pytest.raises(EngineFailed, match="neither a directory nor the name of a hub repository"):
        resolve_checkpoint("no such name!", None, weights=True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "is missing"), ("{", "cannot be read as JSON"), ("[]", "expected a JSON object"), ("[" * 10**5, "JSON")],
)
def test_a_broken_config_is_refused_with_the_reason(tmp_path: Path, content: str | None, reason: str):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(EngineFailed, match=reason):
        read_config(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("key", ["model_file", "auto_map"])
def test_a_checkpoint_that_names_code_is_refused(copy: Path, file: str, key: str):
    refuse_code(copy)
    edit(copy / file, deep=[{"deeper": {key: "evil.py"}}])
    with pytest.raises(EngineFailed, match=f"{file}: '{key}' names Python code"):
        refuse_code(copy)


def test_a_processor_config_that_names_code_is_refused(copy: Path):
    (copy / "processor_config.json").write_text('{"image_processor": {"auto_map": {}}}')
    with pytest.raises(EngineFailed, match=r"processor_config\.json: 'auto_map'"):
        refuse_code(copy)


def test_a_model_takes_images_only_with_a_supported_vision_tower_and_processor(copy: Path):
    config = read_config(copy)
    assert media_kinds(copy, config) == {"image", "video"}
    assert media_kinds(copy, {**config, "vision_config": None}) == frozenset()
    assert media_kinds(copy, {**config, "model_type": "mllama"}) == frozenset()
    deepstack = {**config["vision_config"], "deepstack_visual_indexes": [5, 11]}
    assert media_kinds(copy, {**config, "vision_config": deepstack}) == frozenset()
    assert media_kinds(copy, {**config, "vision_config": deepstack, "model_type": "qwen3_vl"}) == {"image", "video"}
    edit(copy / "preprocessor_config.json", image_processor_type="CLIPImageProcessor")
    assert media_kinds(copy, config) == frozenset()
    (copy / "preprocessor_config.json").unlink()
    assert media_kinds(copy, config) == frozenset()
    (copy / "processor_config.json").write_text(
        '{"image_processor": {"image_processor_type": "Qwen2VLImageProcessor"}}'
    )
    assert media_kinds(copy, config) == {"image"}


def test_the_demo_draft_is_a_checkpoint_with_the_same_tokenizer():
    assert read_config(DEMO_MODEL / "draft")["model_type"] == "qwen3"
    files = [folder / "tokenizer.json" for folder in (DEMO_MODEL, DEMO_MODEL / "draft")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_model_that_is_not_here_is_told_in_a_new_process():
    """The hub's package loads its submodules at their first use, which a test before this one may have been."""
    program = "from engine.processing.checkpoint import checkpoint_here as here; print(here('/no/such/folder', None))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
