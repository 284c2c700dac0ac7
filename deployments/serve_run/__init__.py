"""Starts, watches and stops the server, for `orchard serve` and for Ray's `serve run`."""
