"""Outcome: the result of one check of the self-test, and its line in the report."""

from dataclasses import dataclass
from enum import StrEnum

NAME_WIDTH = 30


class Status(StrEnum):
    """The result of a check. Only FAIL makes the self-test end with status 1."""

    PASS = "PASS"  # Within the limit.
    WARN = "WARN"  # Not equal, but explained by rounding; or slow, or more memory than planned, but nothing wrong.
    FAIL = "FAIL"  # Beyond the limit, or the check ended with an error.
    SKIP = "SKIP"  # Does not apply to this device or model.


class NotApplicable(Exception):
    """The check cannot run on this device or with this model; the message has the reason."""


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Attributes:
        name: Name of the check.
        status: Its result.
        value: What was found, with units; the reason of a check that was skipped.
        limit: What was allowed; '' if nothing is required.
    """

    name: str
    status: Status
    value: str
    limit: str = ""

    @property
    def line(self) -> str:
        """The outcome in one line of the report."""
        limit = f" [limit: {self.limit}]" if self.limit else ""
        return f"{self.status}  {self.name:<{NAME_WIDTH}} {self.value}{limit}"


def graded(name: str, value: str, limit: str, *, good: bool, tolerable: bool = False) -> Outcome:
    """Return PASS if `good`, WARN if only `tolerable`, else FAIL."""
    status = Status.PASS if good else Status.WARN if tolerable else Status.FAIL
    return Outcome(name, status, value, limit)
