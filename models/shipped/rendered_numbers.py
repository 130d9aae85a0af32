"""Images of coloured numbers, and captions that say what they show: what the shipped vision model learns to read."""

from dataclasses import dataclass

import torch

PATCH, MERGE, FRAMES = 8, 2, 2
CELL = PATCH * MERGE
"""Pixels of one token's square, which is also the room of one digit."""

COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.8, 0.2),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.9, 0.85, 0.1),
    "white": (0.95, 0.95, 0.95),
}
LONGEST = 5
ROWS = (1, 2)
"""Digits of a number at most, and cells that an image is high."""

# A 5 x 7 font, one string of rows for each digit.
GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)


@dataclass(frozen=True)
class Picture:
    """An image [3, height, width] of values in [-1, 1], and its caption: number and colour."""

    pixels: torch.Tensor
    caption: str

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of its patches."""
        return 1, self.pixels.shape[1] // PATCH, self.pixels.shape[2] // PATCH

    @property
    def tokens(self) -> int:
        """Tokens that it takes in a prompt."""
        return self.grid[1] * self.grid[2] // MERGE**2

    def patches(self) -> torch.Tensor:
        """[patches, 3 * FRAMES * PATCH * PATCH]: a still as FRAMES equal frames, patches in the order of the squares
        that are merged, as transformers' image processor of Qwen2-VL lays them out."""
        _, rows, columns = self.grid
        squares = self.pixels.reshape(3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
        ordered = squares.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        return ordered.expand(*ordered.shape[:5], FRAMES, PATCH, PATCH).reshape(rows * columns, -1)


def glyph(digit: int) -> torch.Tensor:
    """The digit at twice the size of the font: [14, 10] of 0 and 1."""
    rows = [[float(bit) for bit in row] for row in GLYPHS[digit].split()]
    return torch.tensor(rows).repeat_interleave(2, 0).repeat_interleave(2, 1)


def picture(generator: torch.Generator, longest: int = LONGEST) -> Picture:
    """A number of one to `longest` digits, each somewhere in a cell of its column, in one colour on a dark and noisy
    ground."""

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    digits = [below(10) for _ in range(1 + below(longest))]
    name = list(COLOURS)[below(len(COLOURS))]
    rows = ROWS[below(len(ROWS))]
    height, width = CELL * rows, CELL * len(digits)
    cover = torch.zeros(height, width)
    for place, digit in enumerate(digits):
        top, left = CELL * below(rows) + below(CELL - 14 + 1), place * CELL + below(CELL - 10 + 1)
        cover[top : top + 14, left : left + 10] = glyph(digit)
    ground = torch.rand(3, 1, 1, generator=generator) * 0.3
    ink = torch.tensor(COLOURS[name])[:, None, None]
    shown = ground * (1 - cover) + ink * cover + 0.05 * torch.randn(3, height, width, generator=generator)
    return Picture(shown.clamp(0, 1) * 2 - 1, f"{''.join(map(str, digits))} {name}")
