"""Counters that the device thread alone writes and everyone may read."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """num_finished, num_aborted, num_failed, num_expired (in the queue): rows, one for each choice of a request.
    num_prompt_tokens: prefilled, after a preemption once more. num_cached_tokens: of prompts, from the prefix cache.
    num_sparse: rows whose prompts were taken in by a sparse plan; num_skipped_tokens: that those left out.
    num_accepted: draft tokens that were given out.
    num_bursts: forwards that computed chunks of several prompts; num_failed_bursts: those of which each prompt was
    computed alone afterwards."""

    num_steps: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_expired: int = 0
    num_preempted: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_sparse: int = 0
    num_skipped_tokens: int = 0
    num_output_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_bursts: int = 0
    num_failed_bursts: int = 0
    max_rows_in_a_step: int = 0
    failed_steps_in_a_row: int = 0
