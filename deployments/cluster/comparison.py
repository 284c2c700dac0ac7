"""compare: decides, line by line, whether a machine may join a cluster, and names the command that repairs a line."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from deployments.cluster.facts import Checkpoint, Facts
from deployments.cluster.sources import FOLDERS

MAX_CLOCK_S = 5.0
"""Largest difference of the clocks, beyond which logs and timelines of the machines cannot be read together."""
MIN_BYTES_PER_S = 5e6
"""Slowest link: an image of 10 MB then takes 2 s to the engine."""
MIN_FREE_BYTES = 2 * 2**30
"""Disk space beyond the weights, for logs and snapshots."""
MEMORY_SHARE = 0.9
"""Largest share of the memory that weights may take."""


@dataclass(frozen=True)
class Line:
    """A line of the comparison."""

    name: str
    is_green: bool
    text: str
    remedy: str = ""
    """The command or step that repairs it."""


@dataclass(frozen=True)
class Link:
    """Measurements of the connection to the head."""

    clock_difference_s: float
    """Time of the head minus time of this machine."""
    bytes_per_s: float
    own_address: str
    """Address of this machine, for Ray."""
    seen_address: str
    """Address from which the head sees this machine."""
    head: str
    """Address of the head."""


def compare(head: Facts, own: Facts, link: Link) -> list[Line]:
    """Return one line for each thing that is compared; own has the same models as head, in the same order."""
    return [
        _python(head, own),
        *_packages(head, own),
        _sources(head, own, link),
        _lock_file(head, own, link),
        *(_model(*pair, link) for pair in zip(head.checkpoints, own.checkpoints, strict=True)),
        _disk(head, own),
        _memory(head, own),
        _clock(link),
        _speed(link),
        _address(link),
    ]


def _python(head: Facts, own: Facts) -> Line:
    return _equal("Python", head.python, own.python, f"uv sync --python {head.python}")


def _packages(head: Facts, own: Facts) -> Iterator[Line]:
    for name, version in head.packages.items():
        yield _equal(name, version, own.packages.get(name, "none"), "uv sync --frozen, with the head's uv.lock")


def _sources(head: Facts, own: Facts, link: Link) -> Line:
    folders = " ".join(f"{link.head}:{head.root}/{name}" for name in FOLDERS)
    remedy = (
        f"rsync -a --delete {folders} {own.root}/, which replaces both folders here; a cluster is upgraded from its "
        "head on"
    )
    return _equal("Orchard", head.sources, own.sources, remedy)


def _lock_file(head: Facts, own: Facts, link: Link) -> Line:
    remedy = f"scp {link.head}:{head.root}/uv.lock {own.root}/ && uv sync --frozen"
    return _equal("lock file", head.lock_file or "none", own.lock_file or "none", remedy)


def _model(head: Checkpoint, own: Checkpoint, link: Link) -> Line:
    name, revision = f"model {head.model}", f" --revision {head.revision}" if head.revision else ""
    is_folder = head.model[0] in "/~."
    copied = f"rsync -a {link.head}:{head.model}/ {head.model}/"
    remedy = copied if is_folder else f"orchard pull {head.model}{revision}"
    if not head.fingerprint:
        return Line(name, False, "it is not on the head", f"on the head: {remedy}")
    if not own.fingerprint and head.model[0] == ".":
        return Line(name, False, "not on this machine, and named by a path relative to the working directory", copied)
    if not own.fingerprint:
        seconds = head.num_bytes / link.bytes_per_s
        text = f"not on this machine; {_gib(head.num_bytes)} will be copied from the head, in about {seconds:.0f} s"
        return Line(name, True, text)
    if head.revision is None and not is_folder:
        remedy += ", if the head has the newest revision; else set engine.revision"
    return _equal(name, head.fingerprint, own.fingerprint, remedy)


def _disk(head: Facts, own: Facts) -> Line:
    missing = sum(
        there.num_bytes for there, here in zip(head.checkpoints, own.checkpoints, strict=True) if not here.fingerprint
    )
    needed = missing + MIN_FREE_BYTES
    text = f"{_gib(own.free_disk_bytes)} free, {_gib(needed)} needed"
    return Line("disk", own.free_disk_bytes >= needed, text, f"free {_gib(needed - own.free_disk_bytes)} more")


def _memory(head: Facts, own: Facts) -> Line:
    weights = sum(checkpoint.num_bytes for checkpoint in head.checkpoints)
    most = int(own.memory_bytes * MEMORY_SHARE)
    text = f"{_gib(own.memory_bytes)}, of which the weights take {_gib(weights)}"
    return Line("memory", weights <= most, text, f"serve a model with at most {_gib(most)} of weights")


def _clock(link: Link) -> Line:
    difference = abs(link.clock_difference_s)
    remedy = "sudo sntp -sS time.apple.com" if sys.platform == "darwin" else "sudo timedatectl set-ntp true"
    return Line("clock", difference <= MAX_CLOCK_S, f"{difference:.1f} s apart, at most {MAX_CLOCK_S:g} s", remedy)


def _speed(link: Link) -> Line:
    text = f"{link.bytes_per_s / 1e6:.0f} MB/s from the head, at least {MIN_BYTES_PER_S / 1e6:.0f} MB/s"
    return Line("link", link.bytes_per_s >= MIN_BYTES_PER_S, text, "connect both machines by a cable")


def _address(link: Link) -> Line:
    if ip_address(link.own_address).is_loopback:
        return Line("address", False, f"{link.own_address} is this machine alone", "give --interface")
    text = f"{link.own_address}, seen by the head as {link.seen_address}"
    remedy = f"orchard join {link.head} --interface {link.seen_address}, without address translation in between"
    return Line("address", link.own_address == link.seen_address, text, remedy)


def _equal(name: str, head: str, own: str, remedy: str) -> Line:
    if head == own:
        return Line(name, True, own)
    return Line(name, False, f"{own} here, {head} on the head", remedy)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
