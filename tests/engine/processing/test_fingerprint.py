"""A fingerprint changes with what tokens mean, and with nothing else."""

import shutil
from pathlib import Path

import pytest

from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.fingerprint import checkpoint_fingerprint


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The demo model without its weights."""
    for path in DEMO_MODEL.glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_copies_of_a_checkpoint_have_the_same_fingerprint(copy: Path):
    assert checkpoint_fingerprint(copy) == checkpoint_fingerprint(DEMO_MODEL)


def test_files_without_influence_on_tokens_do_not_change_the_fingerprint(copy: Path):
    (copy / "README.md").write_text("Read me.")
    (copy / "generation_config.json").write_text("{}")
    assert checkpoint_fingerprint(copy) == checkpoint_fingerprint(DEMO_MODEL)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json", "added_tokens.json"])
def test_another_tokenizer_or_configuration_has_another_fingerprint(copy: Path, name: str):
    with (copy / name).open("a") as file:
        file.write(" ")
    assert checkpoint_fingerprint(copy) != checkpoint_fingerprint(DEMO_MODEL)
