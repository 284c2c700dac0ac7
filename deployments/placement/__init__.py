"""Which node a request goes to: pure, without Ray, so that a simulation runs the very same code."""
