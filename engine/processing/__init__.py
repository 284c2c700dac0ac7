"""CPU work in front of and behind the engine: checkpoint files, prompts, text, pictures. Knows no MLX and no torch."""

import os

# transformers says at every import that it found no PyTorch; we want none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
