"""The record of family_calls.py: what it says, what it lacks, and at night whether it is still true."""

import ast
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support import family_calls
from tests.support.families import FAMILIES
from tests.support.families.family import KV, ROTATING, Family
from tests.support.family_calls import WORKER, additions, first_of_layouts, in_gate, recorded

PLAIN = Family({}, f"{KV}*2")
WINDOWED = replace(PLAIN, caches=f"{ROTATING}*2")


def test_a_family_is_covered_if_others_with_its_kinds_of_caches_call_all_its_functions():
    calls = {
        "first": frozenset({"a", "b"}),
        "equal": frozenset({"a", "b"}),
        "less": frozenset({"b"}),
        "more": frozenset({"a", "b", "c"}),
        "windowed": frozenset({"a", "w"}),
        "the same c": frozenset({"c"}),
        "c with windows": frozenset({"c", "w"}),
    }
    families = {name: WINDOWED if "window" in name else PLAIN for name in calls}
    record = additions(calls, families)
    assert record == {"equal": [], "less": [], "more": ["c"], "the same c": [], "c with windows": ["c"]}


def test_a_family_that_was_never_traced_is_in_the_gate():
    names = list(FAMILIES)
    assert in_gate(names, {}) == set(names)
    covered = [name for name in names if recorded().get(name) == []]
    assert covered and in_gate(names, recorded()) == set(names) - set(covered)
    assert first_of_layouts(names).isdisjoint(covered)


def test_each_recorded_family_and_function_exists():
    existing = set(_functions())
    named = {function for functions in recorded().values() for function in functions}
    assert recorded().keys() <= FAMILIES.keys()
    assert not named - existing, "trace the families again: uv run python -m tests.support.family_calls"


def _functions() -> Iterator[str]:
    """Yield all functions of engine/worker, as Python's code objects name them."""
    for path in WORKER.rglob("*.py"):
        stack: list[tuple[str, ast.AST]] = [(f"{path.relative_to(WORKER).as_posix()}:", ast.parse(path.read_text()))]
        while stack:
            place, node = stack.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef):
                    yield f"{place}{child.name}"
                    stack.append((f"{place}{child.name}.<locals>.", child))
                elif isinstance(child, ast.ClassDef):
                    stack.append((f"{place}{child.name}.", child))
                elif isinstance(child, ast.stmt):
                    stack.append((place, child))


@pytest.mark.night("it traces all families, which takes ten minutes; families of an unknown name are in the gate")
def test_the_families_of_the_gate_call_all_functions_that_serve_the_others():
    calls = family_calls.trace_all()
    gate = in_gate(list(FAMILIES), recorded())
    found = {(function, FAMILIES[name].layout[0]) for name in gate for function in calls[name]}
    lacking = {
        name: sorted(function for function in calls[name] if (function, FAMILIES[name].layout[0]) not in found)
        for name in calls
        if name not in gate
    }
    assert not any(lacking.values()), {name: functions for name, functions in lacking.items() if functions}
