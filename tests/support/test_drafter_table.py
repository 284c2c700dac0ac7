"""engine/README.md lists every drafter of the library, and what it says is what a start does."""

import json
from pathlib import Path
from typing import Any

import pytest

import engine.worker  # noqa: F401  # before MLX
from engine.config import EngineConfig
from engine.errors import EngineFailed
from engine.worker import head_loader, loader
from engine.worker.heads.refused_drafters import REFUSED
from tests.support.dflash import write_dflash
from tests.support.drafter_table import DOCUMENT, modules, served, written
from tests.support.families import FAMILIES
from tests.support.zoo import make

DFLASH: dict[str, dict[str, Any]] = {
    "dflash2": {"architectures": ["DFlash2DraftModel"]},
    "dspark": {"dflash_config": {"projector_type": "dspark"}},
    "gemma4_dflash": {},
    "laguna_dflash": {"model_type": "laguna"},
    "qwen3_dspark": {"architectures": ["Qwen3DSparkModel"], "dflash_config": {"markov_rank": 64}},
}
"""Refused drafters with a section for DFlash, by how they differ from a served one: its field is named."""
NAMED = {"gemma4_dspark": {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}}
"""Config.json of refused drafters that are not known by their model_type."""


def test_the_table_has_each_drafter_of_the_library_once():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert written(text) == text, "run python -m tests.support.drafter_table --write"
    assert set(modules()) == set(served()) | set(REFUSED) and not set(served()) & set(REFUSED)
    assert len(modules()) == 21


@pytest.mark.parametrize("name", sorted(set(REFUSED) - set(DFLASH)))
@pytest.mark.parametrize("family", ["llama", "gemma4_text", "qwen3_next"])
def test_refused_drafter_ends_the_start_with_its_name_and_the_reason(name, family, tmp_path):
    """The target has no head of its own, or may have another one."""
    config = {"model_type": name} | NAMED.get(name, {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    found = EngineConfig(model="unread", mtp_head=str(tmp_path))
    with pytest.raises(EngineFailed, match=f"{name}: {REFUSED[name][:40]}"):
        head_loader.find_heads(found, tmp_path / "unread", {"model_type": family})


@pytest.mark.parametrize("name", DFLASH)
def test_refused_drafter_with_a_section_for_dflash_ends_the_start_with_the_field(name, tmp_path):
    model: Path = make(tmp_path / "model", FAMILIES["gemma4_text" if name == "gemma4_dflash" else "qwen3"])
    head_dir = write_dflash(model)
    config = json.loads((head_dir / "config.json").read_text())
    config |= DFLASH[name] | {"dflash_config": config["dflash_config"] | DFLASH[name].get("dflash_config", {})}
    (head_dir / "config.json").write_text(json.dumps(config))
    reason = (
        "the DFlash drafter in .* (is not supported: (architectures|model_type|projector_type) is|cannot draft for)"
    )
    with pytest.raises(EngineFailed, match=reason):
        loader.load(EngineConfig(model=str(model), mtp_head=str(head_dir)), lambda progress: None)
