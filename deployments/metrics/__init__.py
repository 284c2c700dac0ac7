"""The metrics of a node: what they are called and mean, and how they are read and shown."""
