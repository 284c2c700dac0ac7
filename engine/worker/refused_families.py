"""Families that are refused by name: their caches are of served kinds, but their tokens would be wrong.

Other families are refused by the caches of their layers (`family.py`).
"""

BOTH_WAYS = "tokens of a prompt see those after them, and prompts are computed in chunks that see only what is before"
BLOCKS = f"it writes blocks of tokens that see each other (diffusion): {BOTH_WAYS}"
CROSS = "its cross-attention reads an image or a document in every request, which is not passed to it"
DECISIONS = "it reads decisions off a prompt and generates no text"

REFUSED: dict[str, str] = {
    "afm7": "its last layers take a row's position from the number of slots of its keys, which rows share",
    "clef": DECISIONS,
    "d1": DECISIONS,
    "diffusion_gemma": BLOCKS,
    "falcon_ocr": "its positions are those of pixels, which the library keeps for one prompt at a time",
    "falcon_perception": "the library masks no later tokens of a prompt without an image",
    "florence2": CROSS,
    "llada2_moe": BLOCKS,
    "llava_bunny": "its config.json needs the key auto_map, which names code in the checkpoint",
    "mllama": CROSS,
    "molmo_point": "its answers contain points, which the library computes from image features between two tokens",
    "nemotron_parse": CROSS,
    "paligemma": BOTH_WAYS,
    "phi3small": "the library counts the blocks of its sparse attention from the end of the prompt, not from its start",
}
"""model_type -> why its text cannot be served."""
