"""Which functions of engine/worker serve each family, and so which families the gate needs; recorded in a file.

A family is in the gate if it is the first of its layout, if it calls a function that no family of the gate with the
same kinds of caches calls, or if it is not in the record. All others are served by code that the gate tests already.

    uv run python -m tests.support.family_calls

traces all families, which takes ten minutes, and writes the record.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.support.families import FAMILIES
from tests.support.families.family import Family

WORKER = Path(__file__).resolve().parents[2] / "engine" / "worker"
RECORD = Path(__file__).with_name("family_calls.json")

BY_TIME = (
    "acceptance.py",
    "prompt_lookup.py",
    "drafting.py",
    ".commit",
    "._is_by_model",
    "._row_drafts",
    "nbytes",
    "num_bytes",
)
"""Parts of the names of functions that are left out, as a machine's speed decides whether they are called: accounts of
memory, and all about drafts by prompt lookup, which another test of the gate forces."""


def in_gate(names: Sequence[str], record: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the families that the gate needs: those that the record does not call covered by an empty list."""
    return first_of_layouts(names) | {name for name in names if record.get(name) != []}


def first_of_layouts(names: Sequence[str], families: Mapping[str, Family] = FAMILIES) -> set[str]:
    """Return the first family of each layout."""
    return set({families[name].layout: name for name in reversed(names)}.values())


def additions(calls: Mapping[str, frozenset[str]], families: Mapping[str, Family] = FAMILIES) -> dict[str, list[str]]:
    """Return the record: the functions that each family adds to the families of the gate before it.

    Args:
        calls: The functions that serve each family, in the order of `families`.
        families: The families by name.

    Returns:
        The functions by family, without the first families of the layouts; an empty list for a covered family.
    """
    first = first_of_layouts(list(calls), families)
    found = {(function, families[name].layout[0]) for name in first for function in calls[name]}
    added: dict[str, list[str]] = {}
    for name in calls:
        if name not in first:
            kinds = families[name].layout[0]
            added[name] = sorted(function for function in calls[name] if (function, kinds) not in found)
            found |= {(function, kinds) for function in added[name]}
    return added


@contextmanager
def functions_called() -> Iterator[set[str]]:
    """Collect the functions of engine/worker that are called by this thread: "kv_cache.py:BatchKVLayer.select"."""
    codes: set[CodeType] = set()
    names: set[str] = set()

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(notice)
    try:
        yield names
    finally:
        sys.setprofile(None)
        for code in codes:
            path = Path(code.co_filename)
            if path.is_relative_to(WORKER) and not code.co_name.startswith("<"):
                name = f"{path.relative_to(WORKER).as_posix()}:{code.co_qualname}"
                if not any(part in name for part in BY_TIME):
                    names.add(name)


def trace(name: str) -> frozenset[str]:
    """Return the functions that load a family and serve the tests that the gate runs with it."""
    import pytest

    from tests.engine.worker import test_families

    with tempfile.TemporaryDirectory() as directory:
        path, turns = test_families.made(Path(directory) / "model", name)
        with functions_called() as names:
            served = test_families.Served(test_families.cold(path), turns)
            for test in test_families.OF_EVERY_FAMILY:
                try:
                    test(served)
                except pytest.skip.Exception:
                    continue
        return frozenset(names)


def trace_all() -> dict[str, frozenset[str]]:
    """Return the functions that serve each family."""
    trace(next(iter(FAMILIES)))  # what a process does only once belongs to no family
    return {name: trace(name) for name in FAMILIES}


def recorded() -> dict[str, list[str]]:
    """Return the committed record."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def main() -> None:
    record = additions(trace_all())
    RECORD.write_text(json.dumps(record, indent=0) + "\n")
    sys.stdout.write(f"{len(in_gate(list(FAMILIES), record))} of {len(FAMILIES)} families in the gate\n")


if __name__ == "__main__":
    main()
