"""`orchard pull` and `ls`: a hub on loopback, the hub's own client, and the engine's own check."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.demo import DEMO_MODEL
from tests.deployments.commands.conftest import Orchard
from tests.support.fake_hub import FakeHub

ORCHARD = [sys.executable, "-c", "import sys; from deployments.commands.program import main; sys.exit(main())"]
ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text(json.dumps({"model_type": "nonesuch", "vocab_size": 8}))
    (strange / "model.safetensors").write_bytes(b"x" * 1000)
    model = tmp_path / "model"
    model.mkdir()
    for file in DEMO_MODEL.iterdir():
        if file.is_file():
            shutil.copy(file, model)
    with FakeHub({"org/demo": model, "org/strange": strange}) as hub:
        yield hub


def pull(hub: FakeHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The hub's client reads its settings when it is imported, so it gets a process of its own."""
    own = {"HOME": str(home), "HF_HOME": str(home / "Modelle ü"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    env = {**os.environ, **own, "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
    return subprocess.run([*ORCHARD, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_a_download_that_broke_off_is_continued_and_then_listed(hub: FakeHub, tmp_path: Path):
    hub.breaks_after = 12 * 2**20  # the client writes parts of 10 MiB
    done = pull(hub, tmp_path, "pull", "org/demo", "--json")
    assert done.returncode == 0, done.stderr
    path = Path(json.loads(done.stdout)["path"])
    assert (path / "model.safetensors").read_bytes() == (DEMO_MODEL / "model.safetensors").read_bytes()
    assert any(name == "model.safetensors" and first > 0 for name, first in hub.sent), "it went on where it had ended"
    listed = pull(hub, tmp_path, "ls", "--json")
    found = {one["model"]: one for one in json.loads(listed.stdout)}
    assert found["org/demo"]["fits"] == "yes, 32768 tokens" and found["org/demo"]["family"] == "qwen3_5"


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_downloaded(hub: FakeHub, tmp_path: Path):
    done = pull(hub, tmp_path, "pull", "org/strange")
    assert done.returncode == 1 and "nonesuch" in done.stderr and "--force" in done.stderr
    assert "model.safetensors" not in {name for name, _ in hub.sent}
    done = pull(hub, tmp_path, "pull", "org/nothing")
    assert done.returncode == 1 and "org/nothing" in done.stderr and "Traceback" not in done.stderr


def test_directories_are_listed_and_incomplete_models_are_named(orchard: Orchard, tmp_path: Path):
    folder = tmp_path / "with spaces ü" / "part"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization": {"bits": 4}}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    found = {one["model"]: one for one in json.loads(orchard("ls", "--quick", "--json", folder.parent)[1])}
    assert found[str(folder)]["bits"] == 4 and found[str(folder)]["fits"].startswith("no: files are missing")
    assert found["demo"]["num_bytes"] > 10**7 and found["demo"]["fits"] is None
    assert orchard("ls", tmp_path / "nothing")[0] == 1
