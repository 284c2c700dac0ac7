import json
import shutil
from pathlib import Path

from deployments.cluster.facts import Checkpoint, Facts, read_checkpoint, read_facts
from deployments.cluster.sources import sources_digest
from engine.demo import DEMO_MODEL


def test_facts_pass_through_json_and_name_this_machine():
    facts = read_facts([("demo", None), ("no-such/model", None)])
    assert Facts.of_json(json.loads(json.dumps(facts.as_json()))) == facts
    assert facts.checkpoints[0].fingerprint and facts.checkpoints[0].num_bytes > 0
    assert facts.checkpoints[1].fingerprint == "" and facts.checkpoints[1].num_bytes == 0
    assert facts.memory_bytes > 0 and facts.free_disk_bytes > 0 and facts.sources == sources_digest()


def test_the_fingerprint_depends_on_weights_configuration_and_tokenizer(tmp_path: Path):
    for name in ("first", "second"):
        shutil.copytree(DEMO_MODEL, tmp_path / name, ignore=shutil.ignore_patterns("draft"))
    first, second = (read_checkpoint(str(tmp_path / name), None) for name in ("first", "second"))
    assert first.fingerprint == second.fingerprint != ""
    for file in ("config.json", "tokenizer_config.json", "model.safetensors"):
        path = next((tmp_path / "second").glob(file))
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes((content[-1] ^ 1,)) if file.endswith("json") else flipped(content))
        assert read_checkpoint(str(tmp_path / "second"), None).fingerprint != first.fingerprint, file
        path.write_bytes(content)


def test_weights_that_cannot_be_read_count_as_missing(tmp_path: Path):
    """A Mac that joins copies them from the head."""
    shutil.copytree(DEMO_MODEL, model := tmp_path / "model", ignore=shutil.ignore_patterns("draft"))
    assert read_checkpoint(str(model), None).num_bytes > 10**6
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert read_checkpoint(str(model), None) == Checkpoint(str(model), None, "", 0)


def flipped(content: bytes) -> bytes:
    """Change a byte at the start of the first tensor."""
    start = 8 + int.from_bytes(content[:8], "little")
    return content[:start] + bytes((content[start] ^ 1,)) + content[start + 1 :]


def test_the_digest_of_the_sources_depends_on_names_and_contents(tmp_path: Path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "deployments").mkdir()
    file = tmp_path / "engine" / "a.py"
    file.write_text("a = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "engine" / "notes.md").write_text("no code")
    assert sources_digest(tmp_path) == before
    file.write_text("a = 2\n")
    changed = sources_digest(tmp_path)
    assert changed != before
    file.rename(tmp_path / "engine" / "b.py")
    assert sources_digest(tmp_path) not in (before, changed)
