"""Images: shapes on one flat color, numbers, and plain colors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from tests.demo_model.world.draws import Draws
from tests.demo_model.world.words import BACKGROUNDS, COLORS, SHAPES

Color = tuple[int, int, int]

ALL_COLORS: dict[str, Color] = COLORS | BACKGROUNDS
BLACK = (0, 0, 0)
MAX_ASPECT_RATIO = 2.5
MAX_TRIES = 60
"""How often a place is drawn for a shape, smaller each time, before the scene stays without it."""
MIN_RADIUS, MIN_DISTANCE = 8.5, 4
MIN_CONTRAST = 130
"""Sum over RGB; a shape that differs less from the background gets an outline."""
LARGE_SIZES = [
    *((320, 240), (240, 320), (400, 300), (300, 200), (512, 384), (640, 480), (300, 300), (512, 512), (480, 320)),
    (320, 320),
]


@dataclass(frozen=True)
class Shape:
    """Center and radius in pixels."""

    color: str
    kind: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        """Return what it is called, such as "red circle"."""
        return f"{self.color} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """background: name of a color. shapes: in the order in which they were drawn."""

    image: Image.Image
    shapes: Sequence[Shape]
    background: str

    @property
    def from_left(self) -> list[Shape]:
        """Return the shapes from left to right."""
        return sorted(self.shapes, key=lambda shape: shape.x + 0.001 * shape.y)

    @property
    def unique(self) -> list[Shape]:
        """Return the shapes whose name no other has."""
        names = [shape.name for shape in self.shapes]
        return [shape for shape in self.shapes if names.count(shape.name) == 1]


@dataclass(frozen=True)
class Canvas:
    """An empty image."""

    image: Image.Image
    background: str


def small_canvas(draws: Draws) -> Canvas:
    """Return an empty image of 64 to 256 pixels per side."""
    if draws.chance(0.35):
        width = height = draws.choice([64, 96, 128, 160, 192, 224, 256])
    else:
        width, height = draws.randint(64, 256), draws.randint(64, 256)
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            width = height
    return _canvas(draws, width, height, [*BACKGROUNDS, "white", "black", "white"])


def varied_canvas(draws: Draws) -> Canvas:
    """Return an empty image: small, of the largest size that is not scaled down, or larger."""
    kind = draws.random()
    if kind < 0.30:
        return small_canvas(draws)
    if kind < 0.55:
        width = height = 256
    elif kind < 0.70:
        width = height = draws.choice([128, 160, 192, 200, 224, 240])
    elif kind < 0.92:
        width, height = draws.randint(140, 256), draws.randint(140, 256)
    else:
        width, height = draws.choice(LARGE_SIZES)
    return _canvas(draws, width, height, [*BACKGROUNDS, "white", "black", "white", "white"])


def _canvas(draws: Draws, width: int, height: int, backgrounds: list[str]) -> Canvas:
    background = draws.choice(backgrounds)
    return Canvas(Image.new("RGB", (width, height), vary(draws, ALL_COLORS[background], 10)), background)


def vary(draws: Draws, color: Color, by: int = 18) -> Color:
    """Return a color near this one."""
    red, green, blue = (max(0, min(255, value + draws.randint(-by, by))) for value in color)
    return red, green, blue


def draw_scene(draws: Draws, num_shapes: int | None = None, color: str | None = None) -> Scene:
    """Return shapes of any color on a small canvas. color: of all shapes, None for any."""
    canvas = small_canvas(draws)
    count = num_shapes or draws.choice([1, 1, 2, 2, 3, 4])
    colors = [name for name in COLORS if name != canvas.background]
    return draw_shapes(draws, canvas, count, lambda _: (color or draws.choice(colors), draws.choice(SHAPES)))


def draw_varied_scene(draws: Draws, num_shapes: int) -> Scene:
    """Return shapes of which several have the same color or kind, on a varied canvas."""
    canvas = varied_canvas(draws)
    colors, kinds = [name for name in COLORS if name != canvas.background], SHAPES
    if num_shapes > 1:
        if draws.chance(0.55):
            colors = draws.sample(colors, min(len(colors), draws.randint(2, 3)))
        if draws.chance(0.35):
            kinds = draws.sample(kinds, draws.randint(1, 2))

    def look(shapes: Sequence[Shape]) -> tuple[str, str]:
        color, kind = draws.choice(colors), draws.choice(kinds)
        if num_shapes > 1 and draws.chance(0.7):  # mostly shapes that can be told apart
            for _ in range(8):
                if all((shape.color, shape.kind) != (color, kind) for shape in shapes):
                    break
                color, kind = draws.choice(colors), draws.choice(kinds)
        return color, kind

    return draw_shapes(draws, canvas, num_shapes, look)


def draw_shapes(
    draws: Draws, canvas: Canvas, num_shapes: int, look: Callable[[Sequence[Shape]], tuple[str, str]]
) -> Scene:
    """Draw up to num_shapes shapes, as many as find room.

    Args:
        look: gets the shapes so far; returns color and kind of the next.
    """
    shapes: list[Shape] = []
    for _ in range(num_shapes):
        shape = _placed(draws, canvas.image.size, num_shapes, shapes, look(shapes))
        if shape is None:
            break
        shapes.append(shape)
    pen, background = ImageDraw.Draw(canvas.image), ALL_COLORS[canvas.background]
    for shape in shapes:
        contrast = sum(abs(a - b) for a, b in zip(COLORS[shape.color], background, strict=True))
        outline = BLACK if contrast < MIN_CONTRAST or draws.chance(0.2) else None
        fill = vary(draws, COLORS[shape.color])
        rotation = draws.uniform(-0.2, 0.2) if draws.chance(0.4) else 0.0
        draw_shape(pen, shape, fill, outline, rotation)
    return Scene(canvas.image, shapes, canvas.background)


def _placed(
    draws: Draws, size: tuple[int, int], num_shapes: int, others: Sequence[Shape], look: tuple[str, str]
) -> Shape | None:
    width, height = size
    side = min(size)
    largest = 0.42 if num_shapes == 1 else 0.27 if num_shapes == 2 else 0.21
    smallest = 0.16 if num_shapes <= 2 else 0.13
    for attempt in range(MAX_TRIES):
        radius = max(MIN_RADIUS, side * draws.uniform(smallest, largest) * (1 - attempt / 140))
        if 2 * radius + 4 > side:
            radius = side / 2 - 3
        x, y = draws.uniform(radius + 1, width - radius - 1), draws.uniform(radius + 1, height - radius - 1)
        shape = Shape(*look, x, y, radius)
        if all(_are_apart(shape, other) for other in others):
            return shape
    return None


def _are_apart(one: Shape, other: Shape) -> bool:
    distance = 1.05 * (one.radius + other.radius) + MIN_DISTANCE
    return (one.x - other.x) ** 2 + (one.y - other.y) ** 2 > distance**2


def draw_shape(
    pen: ImageDraw.ImageDraw, shape: Shape, fill: Color, outline: Color | None, rotation: float = 0.0
) -> None:
    """Draw a shape; rotation in radians, of triangles and stars."""
    x, y, radius = shape.x, shape.y, shape.radius
    if shape.kind == "circle":
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=fill, outline=outline)
    elif shape.kind == "square":
        half = radius * 0.9
        pen.rectangle([x - half, y - half, x + half, y + half], fill=fill, outline=outline)
    else:
        radii = [radius] * 3 if shape.kind == "triangle" else [radius * 1.08, radius * 0.45] * 5
        angles = [rotation + corner * 2 * math.pi / len(radii) for corner in range(len(radii))]
        corners = [(x + r * math.sin(angle), y - r * math.cos(angle)) for r, angle in zip(radii, angles, strict=True)]
        pen.polygon(corners, fill=fill, outline=outline)
