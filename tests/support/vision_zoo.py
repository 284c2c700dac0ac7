"""Random tiny checkpoints of the families whose images are supported, and the tokens that mlx_vlm gives for them."""

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine.worker  # noqa: F401  # before MLX

import mlx.core as mx  # isort: skip
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.protocol import ImagePatches
from engine.worker.patches import families
from engine.worker.vision import VisionEncoder
from tests.support.families.family import VOCAB_SIZE
from tests.support.sighted_family import IDS, SPECIAL_TOKENS, Pixels, SightedFamily
from tests.support.zoo import Greedy, drawn, empty_cache, greedy, new_module

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- 'IMAGE' if part.type == 'image' else '<start><video><end>' if part.type == 'video' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

TEXT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
"""A template that takes no parts."""


def make(out: Path, family: SightedFamily) -> Path:
    """Write the family's checkpoint in float32, with tokenizer and image processor; return its directory."""
    families.correct()
    with family.built():
        module, rng = new_module(family.config), np.random.default_rng(family.seed)
    parameters: Any = tree_flatten(module.parameters())
    module.update(tree_unflatten([(key, drawn(rng, key, value)) for key, value in sorted(parameters)]))
    named: Any = tree_flatten(module.parameters())
    write_files(out, family)
    mx.save_safetensors(str(out / "model.safetensors"), dict(named), metadata={"format": "mlx"})
    return out


def bytes_between_pieces(vision: VisionEncoder, image: ImagePatches) -> list[int]:
    """Encode an image block by block; return the bytes that are kept after each block but the last one."""
    encoding, found = vision.begin(image), []
    while encoding.features is None:
        vision.advance(encoding, 1)
        if encoding.state is not None:
            found.append(sum(array.nbytes for array in encoding.state.arrays))
    return found


def write_files(out: Path, family: SightedFamily) -> Path:
    """Write all files of a checkpoint but the weights; return the directory."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(copy.deepcopy(family.config)))
    (out / "preprocessor_config.json").write_text(json.dumps(family.processor))
    if family.video is not None:
        (out / "video_preprocessor_config.json").write_text(json.dumps(family.video))
    (out / "processor_config.json").write_text(json.dumps(family.processor_config))
    (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    template = TEXT_TEMPLATE if family.template is None else TEMPLATE.replace("IMAGE", family.template)
    (out / "chat_template.jinja").write_text(template)
    _tokenizer(family.names).save(str(out / "tokenizer.json"))
    return out


def reference(
    module: Any, token_ids: Sequence[int], pixels: Pixels, num_tokens: int, family: SightedFamily | None = None
) -> Greedy:
    """Return the answer to a prompt, each token from one forward over all tokens before it, as mlx_vlm.generate does,
    but with the masks of the family.

    Args:
        module: The library's model.
        token_ids: The prompt, with all image tokens.
        pixels: Its images, prepared by the library's processor; {} for a text.
        num_tokens: Tokens of the answer.
        family: Needed where it has `features` or an `embedder`.
    """
    lm, logits = module.language_model, []
    tokens: list[int] = []
    arrays = {name: mx.array(value) for name, value in pixels.items()}
    if pixels and family is not None and family.features is not None:
        arrays["cached_image_features"] = family.features(module, arrays)
    embed = None
    if pixels and family is not None and family.embedder is not None:
        embed = family.embedder(module, arrays)
    while len(tokens) < num_tokens:
        ids = mx.array([[*token_ids, *tokens]], mx.int32)
        cache = empty_cache(lm)
        given = {"pixel_values": None, "mask": mx.ones_like(ids), **arrays}
        embedded = module.get_input_embeddings(ids, **given) if embed is None else embed(ids)
        more = {name: value for name, value in embedded.to_dict().items() if value is not None}
        with _masks_of(family, lm, ids):
            if family is not None and family.logits is not None:
                found = family.logits(lm, embedded.inputs_embeds, len(token_ids))
            else:
                found = lm(ids, cache=cache, **more).logits
            logits.append(np.array(found[0, -1]))
        tokens.append(int(logits[-1].argmax()))
    return greedy(tokens, logits)


@contextmanager
def _masks_of(family: SightedFamily | None, language_model: Any, ids: mx.array) -> Iterator[None]:
    """Let the library's module mask a whole sequence [1, L] as transformers does, in the layers of the family."""
    if family is None or not family.both_ways:
        yield
        return
    tokens, place = np.array(ids)[0], np.arange(ids.shape[1])
    run = np.where(tokens == IDS["<image>"], np.cumsum(tokens != IDS["<image>"]), -1)  # runs have tokens between them
    before, same = place <= place[:, None], (run == run[:, None]) & (run >= 0)

    def mask(h: mx.array, cache: Any = None, window_size: int | None = None, return_array: bool = False) -> mx.array:
        seen: Any = before | same if ("window" if window_size else "full") in family.both_ways else before
        return mx.array(seen & (place > place[:, None] - window_size) if window_size else seen)

    names = vars(sys.modules[type(language_model.model).__module__])
    library = names["create_attention_mask"]
    names["create_attention_mask"] = mask
    try:
        yield
    finally:
        names["create_attention_mask"] = library


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random image of smooth areas."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


def _tokenizer(names: dict[str, str]) -> Tokenizer:
    """Bytes, and the special tokens. names: see SightedFamily."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[names.get(token, token) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["\n\n"], trainer)
    return tokenizer
