"""Images of numbers, in Pillow's default font."""

import math
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from tests.demo_model.world.draws import Draws
from tests.demo_model.world.scenes import ALL_COLORS, Canvas, Color, small_canvas, varied_canvas

WHITE, BLACK, YELLOW, DARK_BLUE, DARK_RED = (255, 255, 255), (0, 0, 0), (240, 215, 40), (20, 20, 120), (150, 20, 20)
MEDIUM_BACKGROUNDS = ("brown", "gray", "dark gray")
DARK = 380
"""Sum over RGB below which a background is dark."""
MIN_SIZE, MAX_SIZE = 22, 120
"""Sizes of the font, in an image that is not scaled down."""
MIN_WIDTH_OF_FOUR = 96
"""Pixels; narrower images have at most three digits."""

Box = tuple[float, float, float, float]


def draw_number(draws: Draws) -> tuple[Image.Image, str]:
    """Return a small image with a number of up to four digits, and the number."""
    canvas = small_canvas(draws)
    digits = _digits(draws, canvas, [1, 2, 3, 4])
    color = _color(draws, canvas, [BLACK, DARK_BLUE, DARK_RED])
    font, box = _fitting_font(draws, canvas.image, digits, scale=1.0)
    _write(canvas.image, digits, color, font, box, _anywhere(draws, canvas.image, box))
    return canvas.image, digits


def draw_varied_number(draws: Draws) -> tuple[Image.Image, str]:
    """Return an image of any size with a number, often of four digits and sometimes in the middle."""
    canvas = varied_canvas(draws)
    digits = _digits(draws, canvas, [1, 2, 3, 3, 4, 4])
    color = _color(draws, canvas, [BLACK, BLACK, DARK_BLUE, DARK_RED])
    width, height = canvas.image.size
    font, box = _fitting_font(draws, canvas.image, digits, scale=max(1.0, math.sqrt(width * height / 65536)))
    if draws.chance(0.3):
        place = (width - (box[2] - box[0])) / 2, (height - (box[3] - box[1])) / 2
    else:
        place = _anywhere(draws, canvas.image, box)
    _write(canvas.image, digits, color, font, box, place)
    return canvas.image, digits


def _digits(draws: Draws, canvas: Canvas, lengths: list[int]) -> str:
    length = draws.choice(lengths if canvas.image.width >= MIN_WIDTH_OF_FOUR else [1, 2, 3])
    return "".join(draws.choice("0123456789") for _ in range(length))


def _color(draws: Draws, canvas: Canvas, dark_colors: list[Color]) -> Color:
    is_dark = sum(ALL_COLORS[canvas.background]) < DARK
    color = draws.choice([WHITE, YELLOW] if is_dark else dark_colors)
    if not is_dark and canvas.background in MEDIUM_BACKGROUNDS:
        return draws.choice([BLACK, WHITE])
    return color


def _fitting_font(draws: Draws, image: Image.Image, digits: str, scale: float) -> tuple[ImageFont.FreeTypeFont, Box]:
    """A font in which the digits fit into the image, and their box. scale: of the font's limits."""
    width, height = image.size
    smallest = int(MIN_SIZE * scale)
    largest = min(int(height * 0.75), int(width / (len(digits) * 0.62)), int(MAX_SIZE * scale))
    size = draws.randint(smallest, max(smallest + 1, largest))
    while True:
        font = _font(size)
        box = ImageDraw.Draw(image).textbbox((0, 0), digits, font=font)
        if (box[2] - box[0] <= width - 4 and box[3] - box[1] <= height - 4) or size <= 12:
            return font, box
        size -= 2


def _anywhere(draws: Draws, image: Image.Image, box: Box) -> tuple[float, float]:
    width, height = image.size
    x = draws.uniform(2, max(3, width - (box[2] - box[0]) - 2))
    return x, draws.uniform(2, max(3, height - (box[3] - box[1]) - 2))


def _write(
    image: Image.Image,
    digits: str,
    color: Color,
    font: ImageFont.FreeTypeFont,
    box: Box,
    place: tuple[float, float],
) -> None:
    ImageDraw.Draw(image).text((place[0] - box[0], place[1] - box[1]), digits, fill=color, font=font)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font
