from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deployments.cluster.comparison import Line, Link, compare
from deployments.cluster.facts import Checkpoint, Facts

GIB = 2**30
MODEL = Checkpoint("org/model", "abc", "f" * 32, 20 * GIB)
FACTS = Facts(
    python="3.11.7",
    packages={"ray": "2.60.0", "mlx": "0.32.4", "mlx-lm": "0.32.2", "mlx-vlm": "0.7.10"},
    sources="a" * 32,
    lock_file="b" * 32,
    checkpoints=(MODEL,),
    memory_bytes=64 * GIB,
    free_disk_bytes=100 * GIB,
    time_s=1e9,
    root="/work/orchard",
)
LINK = Link(0.1, 100e6, "192.168.1.11", "192.168.1.11", "192.168.1.10")
Change = Callable[[], tuple[Facts, Facts, Link]]


def own(**changed: Any) -> Change:
    return lambda: (FACTS, replace(FACTS, **changed), LINK)


def link(**changed: Any) -> Change:
    return lambda: (FACTS, FACTS, replace(LINK, **changed))


def model(head: Checkpoint, here: Checkpoint) -> Change:
    return lambda: (replace(FACTS, checkpoints=(head,)), replace(FACTS, checkpoints=(here,)), LINK)


def red(lines: list[Line]) -> list[Line]:
    return [line for line in lines if not line.is_green]


def test_equal_machines_have_only_green_lines():
    lines = compare(FACTS, FACTS, LINK)
    assert not red(lines)
    names = "Python, ray, mlx, mlx-lm, mlx-vlm, Orchard, lock file, model org/model, disk, memory, clock, link, address"
    assert [line.name for line in lines] == names.split(", ")


@pytest.mark.parametrize(
    ("change", "name", "text", "remedy"),
    [
        (own(python="3.11.9"), "Python", "3.11.9 here, 3.11.7 on the head", "uv sync --python 3.11.7"),
        (own(packages={**FACTS.packages, "ray": "2.59.0"}), "ray", "2.59.0 here", "uv sync --frozen"),
        (own(packages={**FACTS.packages, "mlx": "0.32.3"}), "mlx", "0.32.3 here", "uv sync --frozen"),
        (own(packages={**FACTS.packages, "mlx-lm": "1"}), "mlx-lm", "1 here, 0.32.2 on the head", "uv sync"),
        (own(packages={**FACTS.packages, "mlx-vlm": "1"}), "mlx-vlm", "1 here, 0.7.10 on the head", "uv sync"),
        (own(sources="c" * 32, root="/here"), "Orchard", "ccc", "192.168.1.10:/work/orchard/engine /here/"),
        (own(lock_file="c" * 32, root="/here"), "lock file", "ccc", "scp 192.168.1.10:/work/orchard/uv.lock /here/"),
        (own(lock_file=""), "lock file", "none here, bbb", "scp"),
        (own(free_disk_bytes=GIB), "disk", "1.0 GiB free, 2.0 GiB needed", "free 1.0 GiB more"),
        (own(memory_bytes=16 * GIB), "memory", "16.0 GiB, of which the weights take 20.0 GiB", "at most 14.4 GiB"),
        (link(clock_difference_s=-7.0), "clock", "7.0 s apart, at most 5 s", "sudo"),
        (link(bytes_per_s=2e6), "link", "2 MB/s from the head, at least 5 MB/s", "cable"),
        (link(seen_address="10.0.0.1"), "address", "seen by the head as 10.0.0.1", "--interface 10.0.0.1"),
        (link(own_address="127.0.0.1", seen_address="127.0.0.1"), "address", "this machine alone", "--interface"),
        (
            model(MODEL, replace(MODEL, fingerprint="0" * 32)),
            "model org/model",
            "000",
            "orchard pull org/model --revision abc",
        ),
        (
            model(replace(MODEL, revision=None), replace(MODEL, revision=None, fingerprint="0" * 32)),
            "model org/model",
            "000",
            "set engine.revision",
        ),
        (
            model(replace(MODEL, model="/m/x"), replace(MODEL, model="/m/x", fingerprint="0" * 32)),
            "model /m/x",
            "000",
            "rsync -a 192.168.1.10:/m/x/ /m/x/",
        ),
        (
            model(replace(MODEL, model="./x"), replace(MODEL, model="./x", fingerprint="", num_bytes=0)),
            "model ./x",
            "named by a path relative to the working directory",
            "rsync -a 192.168.1.10:./x/ ./x/",
        ),
        (
            model(replace(MODEL, fingerprint=""), replace(MODEL, fingerprint="")),
            "model org/model",
            "not on the head",
            "on the head: orchard pull",
        ),
    ],
)
def test_each_difference_is_one_red_line_with_its_remedy(change: Change, name: str, text: str, remedy: str):
    (line,) = red(compare(*change()))
    assert line.name == name and text in line.text and remedy in line.remedy


def test_a_model_that_is_missing_needs_its_space_on_the_disk():
    head, here = FACTS, replace(FACTS, checkpoints=(replace(MODEL, fingerprint="", num_bytes=0),))
    names = [line.name for line in red(compare(head, replace(here, free_disk_bytes=21 * GIB), LINK))]
    assert names == ["disk"]


def test_a_model_that_is_missing_is_announced_with_the_time_that_copying_it_takes():
    here = replace(FACTS, checkpoints=(replace(MODEL, fingerprint="", num_bytes=0),))
    (line,) = [line for line in compare(FACTS, here, LINK) if line.name == "model org/model"]
    assert line.is_green
    assert line.text == "not on this machine; 20.0 GiB will be copied from the head, in about 215 s"
