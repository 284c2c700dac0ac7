"""The patch of AFM 7 is still needed; test_families.py compares its tokens."""

import inspect
import sys

from engine.worker.patches import afm7_reuse


def test_the_library_still_takes_positions_from_the_number_of_slots():
    """When this fails, see whether the patch can go."""
    assert "cache[-1].state" in inspect.getsource(afm7_reuse.LIBRARY)
    assert "offset=S - L" in inspect.getsource(sys.modules[afm7_reuse.AFMModel.__module__])
