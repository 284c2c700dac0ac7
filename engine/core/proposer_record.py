"""What is known of one proposer: its configuration, the acceptance of its drafts, its watchdog. Pure."""

from collections.abc import Collection
from typing import Any, Literal

from engine.config import DraftLimits, EngineConfig
from engine.core.acceptance_watchdog import AcceptanceWatchdog
from engine.core.draft_figures import AcceptanceRates
from engine.core.runner import SELECTIVE, Drafts, Proposer, RowOutput

Mode = Literal["auto", "off"] | DraftLimits


def modes_of(config: EngineConfig) -> dict[Proposer, Mode]:
    """Return the configuration of each proposer. With fixed limits a later one precedes those before it."""
    return {
        "mtp": config.mtp,
        "draft_model": "off" if config.draft_model is None else config.draft_model.limits,
        "prompt_lookup": config.prompt_lookup,
    }


class ProposerRecord:
    """One proposer as the speculation controller knows it.

    Args:
        name: The proposer.
        mode: Its configuration.
        choices: The ways to draft with it that the runner offers, by increasing number of tokens.
        no_drafts: Why `choices` is empty, if it is.
    """

    def __init__(self, name: Proposer, mode: Mode, choices: Collection[Drafts], no_drafts: str = ""):
        self.name: Proposer = name
        self.lengths = [drafts.num_tokens for drafts in choices]
        self.limits = mode if isinstance(mode, DraftLimits) else None
        self.reason = (
            (no_drafts or "the runner offers none")
            if not choices
            else "off in the configuration"
            if mode == "off"
            else ""
        )
        self.mode = "off" if self.reason else "auto" if self.limits is None else "fixed"
        self.acceptance = AcceptanceRates(max(self.lengths, default=0))
        self.watchdog = AcceptanceWatchdog(name)
        self._is_selective = name in SELECTIVE
        self.row_share = 0.0 if self._is_selective else 1.0
        """Share of the rows for which it has drafts, as of the last outputs."""
        self._num_rounds = self._num_drafted = self._num_accepted = 0

    @property
    def is_paused(self) -> bool:
        return self.mode == "auto" and self.watchdog.num_rounds_left > 0

    def fixed_length(self, num_rows: int) -> int:
        """Return the configured number of drafts that the runner offers; 0 with too many rows or in another mode."""
        if self.mode != "fixed" or self.limits is None or num_rows > self.limits.max_rows:
            return 0
        return max((k for k in self.lengths if k <= self.limits.max_draft_tokens), default=0)

    def expected_tokens(self, optimistic_beyond: int | None = None) -> list[float]:
        """Return the expected tokens per row and step with each of `lengths`; see AcceptanceRates.expected_tokens."""
        by_depth = self.acceptance.expected_tokens(optimistic_beyond)
        return [1.0 + self.row_share * (by_depth[k] - 1.0) for k in self.lengths]

    def record(self, outputs: Collection[RowOutput], pays: bool) -> bool:
        """Learn from a step of all rows, drafted by this proposer or not; return whether the watchdog trips.

        A row for which prompt lookup found nothing was given no drafts. With an MTP head a row without drafts counts as
        one whose drafts were rejected.

        Args:
            outputs: The rows' outputs.
            pays: See AcceptanceWatchdog.record.
        """
        if self._is_selective:
            self.row_share = sum(output.can_look_up for output in outputs) / len(outputs)
        own = [output for output in outputs if output.proposer == self.name and output.num_drafted]
        drafted = sum(output.num_drafted for output in own)
        accepted = [output.num_accepted for output in (own if self._is_selective or not own else outputs)]
        if drafted:
            self._num_rounds += 1
            self._num_drafted += drafted
            self._num_accepted += sum(accepted)
        self.acceptance.record(max((output.num_drafted for output in own), default=0), accepted)
        return self.watchdog.record(drafted, sum(accepted), pays) and self.mode == "auto"

    def status(self) -> dict[str, Any]:
        """Return the figures for the status page; acceptance is None before anything was drafted."""
        drafted, pause = self._num_drafted, self.watchdog.num_rounds_left
        status: dict[str, Any] = {"mode": self.mode}
        if self.mode == "off":
            status["reason"] = self.reason
        elif self.is_paused:
            status["reason"] = f"drafting is paused for {pause} rounds: few drafts were accepted, or a step failed"
        return status | {
            "acceptance": round(self._num_accepted / drafted, 4) if drafted else None,
            "acceptance_by_depth": [None if mean is None else round(mean, 4) for mean in self.acceptance.by_depth],
            "num_rounds": self._num_rounds,
            "num_drafted": drafted,
            "num_accepted": self._num_accepted,
            "num_watchdog_trips": self.watchdog.num_trips,
        }
