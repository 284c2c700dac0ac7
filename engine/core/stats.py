"""Counters that only the device thread writes and any thread may read."""

from dataclasses import dataclass

from engine.status import EngineCounters


@dataclass
class Stats(EngineCounters):
    """The counters of EngineStatus, and one that it does not show."""

    failed_steps_in_a_row: int = 0  # Reset by each step that succeeds.
