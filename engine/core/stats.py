"""Counters that only the device thread writes and any thread may read."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counters since the start. Rows are counted per choice of a request."""

    num_steps: int = 0  # Steps of the engine.
    num_finished: int = 0  # Rows that finished with an answer.
    num_aborted: int = 0  # Rows that were aborted.
    num_failed: int = 0  # Rows that failed.
    num_expired: int = 0  # Rows that waited in the queue for too long.
    num_preempted: int = 0  # Rows that were preempted, once for each time.
    num_prompt_tokens: int = 0  # Prefilled tokens; those computed again after a preemption count again.
    num_cached_tokens: int = 0  # Prompt tokens that came from the prefix cache.
    num_sparse: int = 0  # Rows whose prompts were prefilled by a sparse plan.
    num_skipped_tokens: int = 0  # Prompt tokens that sparse plans skipped.
    num_output_tokens: int = 0  # Generated tokens.
    num_drafted: int = 0  # Draft tokens that were verified.
    num_accepted: int = 0  # Accepted draft tokens that are part of an answer.
    num_bursts: int = 0  # Forwards that computed chunks of several prompts.
    num_failed_bursts: int = 0  # Such forwards that failed; each prompt was then computed alone.
    max_rows_in_a_step: int = 0  # The most rows in a decode step.
    failed_steps_in_a_row: int = 0  # Reset by each step that succeeds.
