"""Starting, watching and stopping the server: what `orchard serve` does, and what Orchard adds to `serve run`."""
