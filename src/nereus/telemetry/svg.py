"""Just enough SVG for charts in a page: scales, ticks, shapes. Colours are classes, so that a page has its themes.

Coordinates are pixels of the drawing, which a page may scale; y grows downwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scale:
    """Linear, from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (value - self.low) / span * (self.end - self.start) if span else self.start


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values between two others, ends included: 1, 2 or 5 times a power of ten apart, `most` at most."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / distance - 1e-9)
    last = math.floor(high / distance + 1e-9)
    return [i * distance for i in range(first, last + 1)]


def number(value: float) -> str:
    """A coordinate."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass
class Drawing:
    """Shapes in the order they are drawn. name: of the ids in it, so that several stand in one page."""

    name: str
    width: float
    height: float
    shapes: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self.shapes.append(f'<line class="{style}" {ends}/>')

    def path(self, points: Iterable[Point | None], style: str) -> None:
        """Through points; None, or one that is not finite, is a gap. A lone point is drawn as a dot."""
        for run in _runs(points):
            if len(run) == 1:
                x, y = run[0]
                self.shapes.append(f'<circle class="dot {style}" cx="{number(x)}" cy="{number(y)}" r="1.6"/>')
            else:
                d = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in run)
                self.shapes.append(f'<path class="{style}" d="{d}"/>')

    def polygon(self, points: Sequence[Point], style: str, title: str = "") -> None:
        d = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points) + "Z"
        self.shapes.append(f'<path class="{style}" d="{d}">{_title(title)}</path>')

    def rect(self, x: float, y: float, width: float, height: float, style: str, title: str = "") -> None:
        box = f'x="{number(x)}" y="{number(y)}" width="{max(0.0, width):.2f}" height="{max(0.0, height):.2f}"'
        self.shapes.append(f'<rect class="{style}" {box}>{_title(title)}</rect>')

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        place = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"'
        self.shapes.append(f'<text class="{style}" {place}>{escape(words)}</text>')

    def svg(self, title: str, description: str) -> str:
        """The whole, with what it shows in words for those who do not see it."""
        t, d = f"{self.name}-title", f"{self.name}-desc"
        return (
            f'<svg role="img" aria-labelledby="{t} {d}" viewBox="0 0 {number(self.width)} {number(self.height)}">'
            f'<title id="{t}">{escape(title)}</title><desc id="{d}">{escape(description)}</desc>'
            f"{''.join(self.shapes)}</svg>"
        )


def _runs(points: Iterable[Point | None]) -> Iterable[list[Point]]:
    run: list[Point] = []
    for point in points:
        if point is not None and all(map(math.isfinite, point)):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _title(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""
