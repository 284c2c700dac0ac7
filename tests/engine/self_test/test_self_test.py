"""The self-test passes a healthy engine and finds faults of a broken one, in each check that they reach."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.row import Row
from engine.self_test import machine
from engine.self_test.bench import DRAFTS, PLAIN, QUICK, changed
from engine.self_test.outcome import Status
from engine.self_test.self_test import EXACT_DRAFTS, SelfTest
from engine.worker import loader
from engine.worker.language_model import NO_EXACT_VERIFIER
from engine.worker.model_runner import MLXRunner
from tests.support.heads import write_eagle3

TINY = {"layers": 2, "interval": 2, "seed": 3}
SHORT = replace(QUICK, answer_tokens=5, num_positions=2, speed_tokens=4)
SECTIONS = ("memory", "tokens", "speed", "kernels", "other starts")


class BrokenRunner(MLXRunner):
    """Corrupts values that it restores, knows too small a row, and cannot free its caches."""

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[float], None]) -> "BrokenRunner":
        loader.use_device(config.device)
        runner = cls(loader.load(config, progress), config)
        runner.warm_up()
        runner.costs = replace(runner.costs, token_bytes=runner.costs.token_bytes // 4)
        return runner

    def restore(self, rows: Sequence[Row], snapshot: Any, lend: Sequence[Any] = ()) -> None:
        super().restore(rows, snapshot, lend)
        for layer in self._prompts[rows[0].id].cache:
            if hasattr(layer, "values"):
                layer.values = -layer.values

    def free_caches(self) -> None:
        raise ZeroDivisionError("nothing to free")


def test_healthy_engine_passes_and_its_report_has_all_sections(tiny_model: Callable[..., Path]):
    command = [sys.executable, "-m", "engine", "--self-test", "--quick", "--device", "cpu"]
    done = subprocess.run([*command, "--model", str(tiny_model(**TINY))], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in lines if line in SECTIONS] == list(SECTIONS)
    assert not [line for line in lines if line.startswith(("WARN", "FAIL"))], done.stdout
    named = {line.split()[0] for line in lines[1:19]}
    assert named >= {"orchard-mlx", "mlx", "ray", "python", "device", "chip", "dtype"}
    assert lines[-1].startswith("result: ") and "0 WARN, 0 FAIL" in lines[-1]
    assert str(Path.home()) not in done.stdout


def test_engines_without_drafts_have_no_named_heads_and_those_with_limits_the_last_one():
    for named, of_limits in (("a", "a"), (("own", "a"), "a"), (None, None)):
        config = EngineConfig(model="demo", mtp_head=named)
        assert changed(config, **PLAIN).mtp_head is None
        assert changed(config, **{**PLAIN, "mtp": DRAFTS}).mtp_head == of_limits
        assert changed(config, prompt_lookup=DRAFTS).mtp_head == config.mtp_head


@pytest.mark.night("a second whole self-test; the gate runs one on a healthy engine")
def test_healthy_engine_with_named_heads_passes(tiny_model: Callable[..., Path]):
    model = tiny_model(**{**TINY, "layers": 4})
    head = write_eagle3(model, for_sglang=False)
    test = SelfTest(EngineConfig(model=str(model), device="cpu", mtp_head=("own", str(head))), SHORT)
    report = "\n".join(test.lines())
    assert test.exit_status == 0, report
    found = {outcome.name: outcome for outcome in test.outcomes}
    assert found["drafts on = off"].status is Status.PASS, report
    assert (found[EXACT_DRAFTS].status, found[EXACT_DRAFTS].value) == (Status.SKIP, NO_EXACT_VERIFIER), report


@pytest.mark.night("a second whole self-test; the gate runs one on a healthy engine")
def test_faults_are_found_by_the_checks_that_they_reach_and_the_other_checks_still_run(
    tiny_model: Callable[..., Path],
):
    """In bfloat16, where the rounding of healthy parts must not be taken for faults."""
    config = EngineConfig(model=str(tiny_model(**TINY)), device="cpu", dtype="bfloat16")
    test = SelfTest(config, SHORT, BrokenRunner.load)
    report = "\n".join(test.lines())
    failed = {outcome.name: outcome.value for outcome in test.outcomes if outcome.status is Status.FAIL}
    assert test.exit_status == 1
    assert failed.keys() == {
        *("snapshot hit = miss, memory", "snapshot hit = miss, disk", "a row"),
        *("peak of a batch", "left after requests", "image, alone = batch"),
    }, report
    assert failed["left after requests"] == "ZeroDivisionError: nothing to free"


def test_model_that_cannot_be_loaded_is_a_failure_and_all_checks_are_skipped(tiny_model: Callable[..., Path]):
    def fail(config: EngineConfig, progress: Callable[[float], None]) -> MLXRunner:
        raise MemoryError("no memory for the weights")

    test = SelfTest(EngineConfig(model=str(tiny_model(**TINY)), device="cpu"), QUICK, fail)
    assert "FAIL  loading or closing             MemoryError: no memory for the weights" in "\n".join(test.lines())
    assert test.exit_status == 1 and {one.status for one in test.outcomes[1:-3]} == {Status.SKIP}


def test_report_has_no_paths_of_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", "/home/ann")
    assert machine.without_home("cannot read '/home/ann/models/x' or /tmp/y") == "cannot read '<home>' or /tmp/y"
    assert machine.model_name(str(tmp_path)) == tmp_path.name and machine.model_name("org/model") == "org/model"
