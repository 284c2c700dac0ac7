"""When the machine, or the container, is short of memory."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine import host_memory
from engine.host_memory import HostMemory, total_bytes


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    memory = SimpleNamespace(total=1000, available=500)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return memory


def container(path: Path, limit: str, used: int, inactive: int = 0) -> Path:
    for name, text in {"memory.max": limit, "memory.current": str(used)}.items():
        (path / name).write_text(text + "\n")
    (path / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")
    return path


def test_a_memory_shortage_begins_below_the_limit_and_ends_at_a_quarter_above_it(machine, tmp_path):
    memory = HostMemory(100, tmp_path / "none")
    assert memory.shortage() is None
    machine.available = 99
    assert memory.shortage() == (
        "the machine is short of memory: 99 bytes are available, new requests need 100 (memory.min_available_gb)"
    )
    machine.available = 124
    assert memory.shortage() is not None
    machine.available = 125
    assert memory.shortage() is None


def test_the_default_limit_keeps_part_of_the_machine_free_and_a_limit_of_0_is_never_short(machine, tmp_path):
    machine.available = 69
    assert HostMemory(None, tmp_path / "none").shortage() is not None
    machine.available = 0
    assert HostMemory(0, tmp_path / "none").shortage() is None


def test_macos_is_short_of_memory_from_the_critical_level_of_its_kernel_to_the_normal_one(machine, tmp_path):
    level = 1
    memory = HostMemory(None, tmp_path / "none", lambda: level)
    machine.available = 10
    assert memory.shortage() is None, "few bytes count as available on a Mac without pressure"
    level = 2
    assert memory.shortage() is None
    level = 4
    assert memory.shortage() == "the machine is short of memory: macOS reports pressure of level 4"
    level = 2
    assert memory.shortage() is not None
    level = 1
    assert memory.shortage() is None


def test_a_limit_of_the_operator_counts_on_macos_too(machine, tmp_path):
    machine.available = 99
    assert "99 bytes are available" in (HostMemory(100, tmp_path / "none", lambda: 1).shortage() or "")


def test_only_a_mac_with_at_most_16_gib_is_small(machine, monkeypatch):
    for platform, gib, is_small in (("darwin", 16, True), ("darwin", 24, False), ("linux", 8, False)):
        monkeypatch.setattr(host_memory.sys, "platform", platform)
        machine.total = gib * 2**30
        assert host_memory.on_small_mac() is is_small


def test_the_limit_of_a_container_counts_and_its_reclaimable_memory_is_available(machine, tmp_path):
    assert HostMemory(0, container(tmp_path, "400", 350, 20)).available() == 70
    assert total_bytes(tmp_path) == 400
    assert HostMemory(0, container(tmp_path, "max", 350)).available() == 500
    assert total_bytes(tmp_path) == 1000 == total_bytes(tmp_path / "none")


def test_memory_figures_of_this_machine_are_readable():
    assert 0 < HostMemory(None).available() <= psutil.virtual_memory().total
    assert 0 < host_memory.total_bytes() <= psutil.virtual_memory().total


def test_unreadable_memory_figures_report_no_shortage(machine, monkeypatch, tmp_path, caplog):
    def fails() -> None:
        raise ValueError("not a number")

    memory = HostMemory(100, tmp_path / "none")
    monkeypatch.setattr(psutil, "virtual_memory", fails)
    assert memory.shortage() is None and "could not be read" in caplog.text
