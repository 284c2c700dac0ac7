"""ImagePlaceholder: the text that stands for an image in a prompt, for each way in which families write it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.processing.pooled_patches import POOL, row_lengths
from engine.protocol import ImagePatches


@dataclass(frozen=True)
class ImagePlaceholder:
    """The text of one image in a prompt, and its image tokens."""

    text: str
    """Text with one image token per run of image tokens, and the strings around and between the runs."""
    runs: tuple[int, ...]
    """Image tokens of each run."""

    @property
    def num_repeated(self) -> int:
        """Image tokens that the text does not have yet."""
        return sum(self.runs) - len(self.runs)


@dataclass(frozen=True)
class SpecialStrings:
    """The strings of a checkpoint's tokenizer that placeholders are made of."""

    image: str
    """The image token."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """config.json, processor_config.json and tokenizer_config.json in one, the first one's keys first."""

    def named(self, key: str, default: str) -> str:
        """Return the string under a key of the configuration files."""
        value = self.config.get(key)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else default


def one_run(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """All tokens of the image, with nothing around them that the chat template does not write."""
    return ImagePlaceholder(strings.image, (image.num_tokens,))


def in_gemma3(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run per square, as Gemma 3 has it: of the image, and of each of its crops."""
    begin, end = gemma3_begin(strings), strings.named("eoi_token_index", "<end_of_image>")
    text, num_squares = f"\n\n{begin}{strings.image}{end}\n\n", image.grid_thw[0]
    runs = (image.num_tokens // num_squares,) * num_squares
    if num_squares > 1:
        crops = " ".join([text] * (num_squares - 1))
        text = f"Here is the original image {text} and here are some crops to help you see better {crops}"
    return ImagePlaceholder(text, runs)


def gemma3_begin(strings: SpecialStrings) -> str:
    """Return the string that Gemma 3's chat template writes for an image."""
    return strings.named("boi_token_index", "<start_of_image>")


def in_gemma4(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run between two tokens, as Gemma 4 has it."""
    begin, end = gemma4_marks(strings, {})
    return ImagePlaceholder(f"{begin}{strings.image}{end}", (image.num_tokens,))


def gemma4_marks(strings: SpecialStrings, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tokens around an image of Gemma 4."""
    yield strings.named("boi_token", "<|image>")
    yield strings.named("eoi_token", "<image|>")


def in_rows(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run per row of tokens, as Pixtral has it."""
    _, height, width = image.grid_thw
    merge_size = math.isqrt(height * width // image.num_tokens)
    num_rows, next_row = height // merge_size, strings.named("image_break_token", "[IMG_BREAK]")
    text = (strings.image + next_row) * (num_rows - 1) + strings.image
    return ImagePlaceholder(text + strings.named("image_end_token", "[IMG_END]"), (width // merge_size,) * num_rows)


def in_tiles(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run per tile, with the row and column of each, as Idefics3 has it."""
    (num_tiles, _, _), (rows, columns) = image.grid_thw, image.tiles
    around, lines = "<fake_token_around_image>", ""
    for row in range(1, rows + 1):
        lines += "".join(f"{around}<row_{row}_col_{column}>{strings.image}" for column in range(1, columns + 1)) + "\n"
    text = f"{lines}\n" if lines else ""
    runs = (image.num_tokens // num_tiles,) * num_tiles
    return ImagePlaceholder(f"{text}{around}<global-img>{strings.image}{around}", runs)


def in_internvl(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run between the strings that InternVL's processor writes around it."""
    begin, end = strings.named("start_image_token", "<img>"), strings.named("end_image_token", "</img>")
    return ImagePlaceholder(f"{begin}{strings.image}{end}", (image.num_tokens,))


def in_marked_tiles(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run per tile behind its row and column, then one of the thumbnail, as LFM2-VL has it; else one run."""
    (num_tiles, height, width), columns = image.grid_thw, max(image.tiles[1], 1)
    parts = [_tile_mark(i // columns + 1, i % columns + 1) for i in range(num_tiles)]
    num_patches = num_tiles * height * width + image.thumbnail[0] * image.thumbnail[1]
    per_tile = height * width * image.num_tokens // num_patches
    runs = (per_tile,) * num_tiles
    if not any(image.tiles):
        parts = [""]
    elif any(image.thumbnail):
        parts.append(_thumbnail_mark(strings))
        runs += (image.num_tokens - num_tiles * per_tile,)
    begin, end = _around_tiles(strings)
    if not _has_tile_marks(strings):
        return ImagePlaceholder(strings.image * len(runs), runs)
    return ImagePlaceholder(begin + "".join(part + strings.image for part in parts) + end, runs)


def tile_marks(strings: SpecialStrings, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tokens that `in_marked_tiles` may write. settings: Those of the image processor."""
    if not _has_tile_marks(strings):
        return
    yield from _around_tiles(strings)
    if settings["do_image_splitting"]:
        if settings["use_thumbnail"]:
            yield _thumbnail_mark(strings)
        most = int(settings["max_tiles"])
        yield from (_tile_mark(row, 1 + i) for row in range(1, most + 1) for i in range(most // row))


def _has_tile_marks(strings: SpecialStrings) -> bool:
    return bool(strings.config.get("use_image_special_tokens", True))


def _tile_mark(row: int, column: int) -> str:
    return f"<|img_row_{row}_col_{column}|>"


def _thumbnail_mark(strings: SpecialStrings) -> str:
    return strings.named("image_thumbnail_token", "<|img_thumbnail|>")


def _around_tiles(strings: SpecialStrings) -> tuple[str, str]:
    begin, end = (strings.named(f"image_{at}_token", f"<|image_{at}|>") for at in ("start", "end"))
    return begin, end


def in_crops(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run per row of the square of the whole image, then one per row of its crops together, as Molmo2 has it.

    The settings are those of processor_config.json, which mlx_vlm does not read, as transformers does.
    """
    runs, side = row_lengths(image.grid_thw[1], image.unpadded), -(-image.grid_thw[1] // POOL)
    begin, whole_end, row_end = _crop_marks(strings)
    whole, row = strings.image + whole_end, strings.image + row_end
    text = f"{begin}{whole * side}<im_end><im_start>{row * (len(runs) - side)}<im_end>"
    return ImagePlaceholder(text, runs)


def crop_marks(strings: SpecialStrings, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tokens that `in_crops` may write. settings: Those of the image processor."""
    yield from (mark for mark in (*_crop_marks(strings), "<im_start>", "<im_end>") if mark)


def _crop_marks(strings: SpecialStrings) -> tuple[str, str, str]:
    """Return the begin of the whole image and the ends of its rows and of those of the crops, '' for none."""
    given = strings.config.get
    ends, ends_whole = given("image_use_col_tokens", True), given("use_single_crop_col_tokens")
    whole, row = ("<im_col>" * bool(one) for one in (ends if ends_whole is None else ends_whole, ends))
    return "<low_res_im_start>" if given("use_single_crop_start_token", True) else "<im_start>", whole, row


def in_molmo(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run per row of the square of the whole image, then one per row of its crops together, as Molmo has it."""
    runs, side = row_lengths(image.grid_thw[1], image.unpadded), image.grid_thw[1] // POOL
    begin, end, row_end = molmo_marks(strings, {})
    row = strings.image + row_end
    return ImagePlaceholder(f"{begin}{row * side}{end}{begin}{row * (len(runs) - side)}{end}", runs)


def molmo_marks(strings: SpecialStrings, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tokens before and behind the rows of Molmo, and behind each of them."""
    yield from ("<im_start>", "<im_end>", "<im_col>")


def in_phi3(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run before the token with which the text behind the image begins, as Phi-3-vision has it.

    Its processor encodes the texts before, between and behind the images one by one. The numbers of `<|image_1|>` and
    the others tell it the order of the images alone; the model sees only their features.
    """
    return ImagePlaceholder(strings.image + "".join(phi3_marks(strings, {})), (image.num_tokens,))


def phi3_marks(strings: SpecialStrings, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the token with which Phi-3-vision's tokenizer begins a text, unless it begins none."""
    if strings.config.get("add_bos_token") is not False:
        yield strings.named("bos_token", "<s>")


def in_aya(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run per tile behind its number, then one of the whole image, as Aya Vision has it.

    The settings are those of processor_config.json.
    """
    begin, end, _ = aya_marks(strings, {})
    tile, whole = strings.named("tile_token", "TILE"), strings.named("tile_global_token", "TILE_GLOBAL")
    num_tiles = image.grid_thw[0]
    names = [*(f"{tile}_{i}" for i in range(1, num_tiles)), whole]
    text = begin + "".join(name + strings.image for name in names) + end
    return ImagePlaceholder(text, (image.num_tokens // num_tiles,) * num_tiles)


def aya_marker(strings: SpecialStrings) -> str:
    """Return the string that Aya Vision's chat template writes for an image."""
    return strings.named("image_token", "<image>")


def aya_marks(strings: SpecialStrings, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tokens around the tiles of Aya Vision, and the image token."""
    yield strings.named("start_of_img_token", "<|START_OF_IMG|>")
    yield strings.named("end_of_img_token", "<|END_OF_IMG|>")
    yield strings.named("img_patch_token", "<|IMG_PATCH|>")


def in_llama4(image: ImagePatches, strings: SpecialStrings) -> ImagePlaceholder:
    """One run per tile, with tokens between the columns and behind each row, then one of the whole, as Llama 4 has it.

    These strings are fixed in transformers' processor, whatever processor_config.json calls them.
    """
    begin, end, whole, next_column, row_end, _ = llama4_marks(strings, {})
    (num_tiles, _, _), (rows, columns) = image.grid_thw, image.tiles
    row = next_column.join([strings.image] * columns) + row_end
    tiles = row * rows if num_tiles > 1 else ""
    runs = (image.num_tokens // num_tiles,) * num_tiles
    return ImagePlaceholder(f"{begin}{tiles}{whole}{strings.image}{end}", runs)


def llama4_marker(strings: SpecialStrings) -> str:
    """Return the token that Llama 4's chat template writes for an image."""
    return strings.named("image_token", "<|image|>")


def llama4_marks(strings: SpecialStrings, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tokens around the tiles of Llama 4, and the image token."""
    yield from ("<|image_start|>", "<|image_end|>", "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    yield "<|patch|>"
