"""The head of a cluster of machines, and how other machines join it and leave it."""
