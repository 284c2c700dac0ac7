"""Parameters of a test of which the gate runs some and the night all."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def some_at_night(values: Iterable[Any], gate: Container[Any], reason: str, *, are_sets: bool = False) -> list[Any]:
    """Return the parameters of a test; those that are not in `gate` have the mark `night` with the reason.

    A list or tuple `gate` must name parameters that exist: one that was renamed would leave the gate unseen.

    Args:
        values: All parameters.
        gate: Those that the gate runs.
        reason: Why the gate can do without the others.
        are_sets: Whether each value is a tuple with a value for each of several parameters.
    """
    values, mark = list(values), pytest.mark.night(reason)
    unknown = [one for one in gate if one not in values] if isinstance(gate, (list, tuple)) else []
    assert not unknown, f"no parameters: {unknown}"
    return [
        value if value in gate else pytest.param(*(value if are_sets else (value,)), marks=mark) for value in values
    ]
