import os

import pytest

from engine import gpus
from engine.errors import EngineFailed
from engine.gpus import VISIBLE, cuda_gpus, num_engines, see_one_gpu


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with four NVIDIA GPUs."""
    monkeypatch.setattr(gpus.sys, "platform", "linux")
    monkeypatch.setattr(gpus, "has_cuda_backend", lambda: True)
    monkeypatch.setattr(gpus, "_num_gpus", lambda: 4)
    monkeypatch.setenv(gpus.VISIBLE, "")  # so that it is restored
    monkeypatch.delenv(gpus.VISIBLE)
    return monkeypatch


@pytest.mark.parametrize(
    "visible, expected",
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("2", ("2",)),
        (" 3, 1", ("3", "1")),
        ("0,7,1", ("0",)),
        ("1,-1,0", ("1",)),
        ("NoDevFiles", ()),
        ("GPU-8932f937,GPU-5a1b", ("GPU-8932f937", "GPU-5a1b")),
    ],
)
def test_gpus_are_those_that_cuda_shows(machine: pytest.MonkeyPatch, visible: str | None, expected: tuple[str, ...]):
    if visible is not None:
        machine.setenv(gpus.VISIBLE, visible)
    assert cuda_gpus("auto") == cuda_gpus("gpu") == expected
    assert cuda_gpus("cpu") == ()


@pytest.mark.parametrize(
    "visible, reason",
    [
        ("--1", "'--1' is neither the number nor the UUID of a GPU"),
        ("0,²", "'²' is neither"),
        ("0;1", "'0;1' is neither"),
        ("all", "'all' is neither"),
        ("0,1,0", "is '0,1,0', which names the GPU 0 twice"),
    ],
)
def test_a_list_that_is_none_of_gpus_is_refused_with_its_value(machine: pytest.MonkeyPatch, visible: str, reason: str):
    machine.setenv(gpus.VISIBLE, visible)
    with pytest.raises(EngineFailed, match=f"CUDA_VISIBLE_DEVICES is '{visible}'"):
        cuda_gpus("auto")
    with pytest.raises(EngineFailed, match=reason):
        num_engines("all", "gpu")


@pytest.mark.parametrize(
    "visible, expected", [(None, "0"), ("3,1", "3"), ("GPU-5a1b, 2", "GPU-5a1b"), ("2", "2"), ("", ""), ("a,b", "a,b")]
)
def test_a_process_with_mlx_sees_one_gpu_alone(machine: pytest.MonkeyPatch, visible: str | None, expected: str):
    if visible is not None:
        machine.setenv(VISIBLE, visible)
    see_one_gpu()
    assert os.environ[VISIBLE] == expected


def test_several_engines_need_gpus_where_the_device_is_a_gpu(machine: pytest.MonkeyPatch):
    machine.setattr(gpus, "_num_gpus", lambda: 0)
    assert (num_engines("all", "gpu"), num_engines(1, "gpu"), num_engines(2, "auto")) == (1, 1, 2)
    with pytest.raises(EngineFailed, match=r"engines_per_node is 2, and this machine has no GPU .* to 1 or less"):
        num_engines(2, "gpu")


def test_a_machine_has_an_engine_per_gpu_or_as_many_as_are_asked_for(machine: pytest.MonkeyPatch):
    assert (num_engines("all", "auto"), num_engines(1, "auto"), num_engines(4, "auto")) == (4, 1, 4)
    machine.setenv(gpus.VISIBLE, "1,3")
    assert num_engines("all", "auto") == 2
    with pytest.raises(
        EngineFailed, match=r"engines_per_node is 3, and this machine has 2 GPUs .*'1,3'.* to 2 or less"
    ):
        num_engines(3, "auto")


def test_engines_on_a_cpu_are_one_or_as_many_as_are_asked_for(machine: pytest.MonkeyPatch):
    assert (num_engines("all", "cpu"), num_engines(2, "cpu")) == (1, 2)
    machine.setattr(gpus, "has_cuda_backend", lambda: False)
    assert (num_engines("all", "auto"), num_engines(16, "auto")) == (1, 16)


def test_a_mac_has_one_engine(machine: pytest.MonkeyPatch):
    machine.setattr(gpus.sys, "platform", "darwin")
    assert num_engines("all", "auto") == num_engines(1, "gpu") == 1
    with pytest.raises(EngineFailed, match="engines_per_node is 2, and this machine has one GPU"):
        num_engines(2, "auto")
