"""The patch of Limite is still needed; test_families.py compares its tokens."""

import inspect

from engine.worker.patches import limite_rows


def test_the_library_still_takes_one_length_for_all_rows():
    """When this fails, see whether the patch can go."""
    attention, model = (inspect.getsource(function) for function in limite_rows.LIBRARY.values())
    assert "_causal_window_mask(L, offset, self.window, q.dtype)" in attention
    assert "v.transpose(0, 2, 1, 3)[:, -L:]" in attention
    assert "mx.arange(offset, offset + inputs.shape[1])" in model
