"""Ray reads its environment when it is imported: what `serve` and `ray` get when they start, the tests get here."""

from deployments.serve_run.environment import set_defaults

set_defaults()
