"""CPU work before and after the engine: checkpoint files, prompts, text, images. Imports neither MLX nor torch."""

import os

# Silences transformers' advice to install PyTorch, which Orchard does not use.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
