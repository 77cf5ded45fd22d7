"""The paper's figures from real runs: weights, slices over an image, curves, scaling.

Colours can be told apart by colour-blind people (Okabe and Ito; red to blue over white for
weights, white at zero), and lines differ in their marks too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, pairwise
from math import copysign, log2
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import AsinhNorm, Normalize
from matplotlib.figure import Figure
from torch import Tensor, nn

from fastrpb.bias import FastRPB
from fastrpb.bias2d import FastRPB2d
from fastrpb.presets import COLUMNS, ROWS
from fastrpb.tables import Cells, rows_and_columns
from fastrpb.toeplitz import additive_parts

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)))  # as many as `ROWS`
WEIGHTS_MAP = "RdBu_r"
_STRIP = 500  # columns of a strip: fewer than its dots
_RUNNING = 15  # tokens of a running mean
_LIGHT = {"text": "#1f2328", "grid": "#d0d7de"}
_DARK = {"text": "#e6edf3", "grid": "#3d444d"}


@contextmanager
def style(dark: bool = False) -> Iterator[None]:
    """Letters and axes for a light or a dark page, without a ground of their own."""
    colours = _DARK if dark else _LIGHT
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: Any = dict.fromkeys(names, colours["text"])
    settings |= {
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.facecolor": "none",
        "legend.frameon": False,
        "grid.color": colours["grid"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "fastrpb",  # the same bytes for the same figure
        "font.size": 9,
    }
    with mpl.rc_context(settings):
        yield


def biases(model: nn.Module) -> list[FastRPB | FastRPB2d]:
    """The biases of a model, one a layer."""
    return [part for part in model.modules() if isinstance(part, FastRPB | FastRPB2d)]


def weights_of(bias: FastRPB | FastRPB2d) -> Tensor:
    """w by distance: (heads, 2N-1) in one dimension, (heads, 2H-1, 2W-1) over an image.

    >>> weights_of(FastRPB2d(2, 3, 5)).shape
    torch.Size([2, 5, 9])
    """
    if isinstance(bias, FastRPB):
        return bias.weights(bias.max_length).detach().float().cpu()
    w = bias.weights().detach().float().cpu()
    if bias.kind == "full":
        return w
    rows, columns = additive_parts(w, bias.height, bias.width)
    return rows.unsqueeze(-1) + columns.unsqueeze(-2)


def slice_of(weights: Tensor, image: tuple[int, int], pixel: tuple[int, int]) -> Tensor:
    """W[:, pixel] as an image (heads, H, W): what each pixel is given of the one at (row, column).

    >>> w = torch.arange(-3.0, 4).unsqueeze(0)  # w_d = d over 2×2 pixels: pixel minus the reader
    >>> slice_of(w, (2, 2), (1, 0))
    tensor([[[ 2.,  1.],
             [ 0., -1.]]])
    """
    (height, width), (row, column) = image, pixel
    if not (0 <= row < height and 0 <= column < width):
        raise ValueError(
            f"pixel {row},{column} is outside the image: rows 0 to {height - 1}, "
            f"columns 0 to {width - 1}"
        )
    if weights.dim() == 2:
        place, middle = row * width + column, weights.shape[-1] // 2
        distances = place - torch.arange(height * width)
        return weights[:, middle + distances].unflatten(-1, image)
    dy, dx = row - torch.arange(height), column - torch.arange(width)
    return weights[:, height - 1 + dy][:, :, width - 1 + dx]


def squeezed(w: Tensor, columns: int) -> Tensor:
    """(heads, distances) in bins that are even in log(1 + |d|): of each the largest weight by size.

    Drawn at a smaller width than it has, a picture would drop most columns, and the few large
    weights near zero with them.

    >>> squeezed(torch.tensor([[5.0, 0.0, 1.0, -2.0, 3.0, 4.0, -6.0]]), 4)
    tensor([[ 5., -2.,  3., -6.]])
    """
    reach = w.shape[-1] // 2
    ends = torch.linspace(-1, 1, columns + 1, dtype=torch.float64) * log2(1 + reach)
    ends = (ends.sign() * (2 ** ends.abs() - 1)).round().int().tolist()
    parts = [w[:, first + reach : last + reach + 1] for first, last in pairwise(ends)]
    largest = [part.gather(-1, part.abs().argmax(-1, keepdim=True)) for part in parts]
    return torch.cat(largest, dim=-1)


def weights_figure(layers: Sequence[Tensor], word: str = "head") -> Figure:
    """Figure 1: w against the distance, a strip for each head (colour), a panel for each layer.

    Where there are more distances than columns to draw, by the logarithm of the distance.
    """
    figure = Figure(figsize=(7, 0.6 + 1.1 * len(layers)), layout="constrained")
    axes = figure.subplots(len(layers), squeeze=False)[:, 0]
    for number, (ax, w) in enumerate(zip(axes, layers, strict=True), 1):
        reach, end = w.shape[-1] // 2, w.shape[-1] / 2
        if w.shape[-1] > _STRIP:
            w, end = squeezed(w, _STRIP), log2(1 + reach)  # noqa: PLW2901
            ticks = [4**i for i in range(1, int(log2(reach) / 2) + 1)]
            distances = [*(-d for d in reversed(ticks)), 0, *ticks]
            ax.set_xticks([copysign(log2(1 + abs(d)), d) for d in distances], distances)
        box = (-end, end, len(w) - 0.5, -0.5)
        _heat(figure, ax, w, extent=box, aspect="auto", interpolation="nearest")
        ax.set_ylabel(f"layer {number}\n{word}")
        ax.set_yticks(sorted({0, len(w) - 1}))
    axes[-1].set_xlabel(
        "distance m - n from the reading token to the read one, in tokens"
        + ("; the largest weight of each column" if layers[0].shape[-1] > _STRIP else "")
    )
    return figure


def sidedness(w: Tensor) -> Tensor:
    """(heads,) how much the two sides of w differ: (Σ_{d<0} w_d - Σ_{d>0} w_d)/‖w‖.

    Random signs give about ±1. What has much more counts: what was before, what is to come, or the
    one less the other.

    >>> sidedness(torch.tensor([[1.0, 1.0, 0.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0, 1.0]]))
    tensor([2., 0.])
    """
    reach = w.shape[-1] // 2
    difference = w[:, :reach].sum(-1) - w[:, reach + 1 :].sum(-1)
    return difference / w.norm(dim=-1).clamp(min=torch.finfo(w.dtype).tiny)


def sides_figure(layers: Sequence[Tensor], word: str = "head", count: int = 4) -> Figure:
    """The heads of any layer whose sides differ most: w against the distance, and running means."""
    each = [(abs(float(z)), i, h) for i, w in enumerate(layers) for h, z in enumerate(sidedness(w))]
    chosen = sorted(each, reverse=True)[:count]
    rows = -(-len(chosen) // 2)
    figure = Figure(figsize=(7, 0.4 + 1.7 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    for ax, (_, layer, head) in zip(axes, chosen, strict=False):
        w = layers[layer][head]
        reach, shown = len(w) // 2, _reach(w)
        distance = torch.arange(-shown, shown + 1)
        mean = nn.functional.avg_pool1d(
            w[None], _RUNNING, 1, _RUNNING // 2, count_include_pad=False
        )
        ax.axhline(0, color="gray", linewidth=0.5)
        near = slice(reach - shown, reach + shown + 1)
        ax.plot(distance, w[near], color=COLOURS[0], linewidth=0.4, alpha=0.6)
        ax.plot(distance, mean[0, near], color=COLOURS[1], linewidth=1.5)
        ax.set_title(f"layer {layer + 1}, {word} {head}")
    for ax in axes[len(chosen) :]:
        ax.remove()
    figure.supxlabel("distance m - n from the reading token to the read one, in tokens")
    figure.supylabel("w")
    return figure


def slice_figure(
    layers: Sequence[Tensor],
    image: tuple[int, int],
    pixel: tuple[int, int],
    word: str = "head",
    heads: int = 8,
) -> Figure:
    """Figure 2: the bias that a pixel gives to every other, by layer and head.

    Ticks mark the pixel's column and row, so that nothing covers the weights next to it.
    Of more heads than are to be shown, those evenly spread: local inits order them by reach.
    """
    shown = torch.linspace(0, len(layers[0]) - 1, min(heads, len(layers[0]))).round().long()
    heads = len(shown)
    size = (1.1 * heads + 0.9, 1.15 * len(layers) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(layers), heads, squeeze=False)
    for number, (line, w) in enumerate(zip(axes, layers, strict=True), 1):
        pictures = slice_of(w, image, pixel)[shown]
        limit = float(pictures.abs().max()) or 1.0
        colours = ScalarMappable(Normalize(-limit, limit), WEIGHTS_MAP)
        for head, ax, picture in zip(shown.tolist(), line, pictures, strict=True):
            ax.imshow(picture.numpy(), cmap=colours.cmap, norm=colours.norm)
            ax.set_xticks([pixel[1]], [""])
            ax.set_yticks([pixel[0]], [""])
            if number == 1:
                ax.set_title(f"{word} {head}")
        line[0].set_ylabel(f"layer {number}")
        figure.colorbar(colours, ax=list(line), shrink=0.8, label="w")
    figure.suptitle(f"bias given by pixel ({pixel[0]}, {pixel[1]})")
    return figure


def curves_figure(runs: Sequence[tuple[tuple[str, str], list[dict[str, Any]]]]) -> Figure:
    """Loss of training and accuracy of validation against the step, a line for each run.

    Runs of one cell, (row, column) of a table, differ in their seeds and share a look.
    """
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows, _ = rows_and_columns(cell for cell, _ in runs)
    for number, (cell, lines) in enumerate(runs):
        row, column = cell
        train = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        valid = [
            (line["step"], 100 * line["validation"]["accuracy"])
            for line in lines
            if "validation" in line
        ]
        colour, mark = _LOOKS[column]
        look = {"color": colour, "marker": mark, "markersize": 4, "linewidth": 1.0}
        look |= {"linestyle": LINES[rows.index(row)]}
        if cell not in [cell for cell, _ in runs[:number]]:
            look["label"] = f"{ROWS[row]}, {COLUMNS[column]}"
        for ax, points in ((left, train), (right, valid)):
            steps, values = [p[0] for p in points], [p[1] for p in points]
            ax.plot(steps, values, markevery=max(1, len(points) // 8), **look)
    left.set(xlabel="step", ylabel="training loss (cross-entropy)", yscale="log")
    right.set(xlabel="step", ylabel="validation accuracy, %")
    for ax in (left, right):
        ax.grid(alpha=0.5)
    right.legend(fontsize=7)
    return figure


def gains_figure(set_ups: dict[str, Cells]) -> Figure:
    """What positions add: test accuracy, a panel for each set-up, a line for each attention.

    Marks tell the positions apart; bars are standard deviations over the seeds.
    """
    rows, columns = rows_and_columns(key for cells in set_ups.values() for key in cells)
    places = {name: place for place, name in enumerate(rows)}
    wide = min(len(set_ups), 3)
    tall = -(-len(set_ups) // wide)
    size = (1.2 + 2.4 * wide, 0.7 + (0.6 + 0.25 * len(rows)) * tall)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(tall, wide, squeeze=False, sharey=True).flatten()
    marks = {}
    for ax, (title, cells) in zip(axes, set_ups.items(), strict=False):
        for row, place in places.items():
            means = sorted(cell.mean for (name, _), cell in cells.items() if name == row)
            ax.plot(means, [place] * len(means), color="gray", linewidth=0.8)
        for column in columns:
            colour, mark = _LOOKS[column]
            here = {places[row]: cell for (row, name), cell in cells.items() if name == column}
            marks[COLUMNS[column]] = ax.errorbar(
                [cell.mean for cell in here.values()],
                list(here),
                xerr=[cell.std for cell in here.values()],
                **{"fmt": mark, "color": colour, "markersize": 5, "elinewidth": 1.5},
            )
        ax.set_title(title)
        ax.set_yticks(range(len(rows)), [ROWS[row] for row in rows])
        ax.grid(alpha=0.5, axis="x")
    axes[0].invert_yaxis()
    for ax in axes[len(set_ups) :]:
        ax.remove()
    figure.supxlabel("test accuracy, %", fontsize=9)
    figure.legend(marks.values(), marks, loc="outside upper center", ncols=3 * wide)
    return figure


def scaling_figure(curves: dict[str, dict[int, tuple[float, float]]], machine: str) -> Figure:
    """Figure 3: evaluation time and peak memory against the number of tokens, on log scales."""
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    looks = dict(
        zip(dict.fromkeys(name.split(" + ")[0] for name in curves), _looks(), strict=False)
    )
    for name, points in curves.items():
        colour, mark = looks[name.split(" + ")[0]]
        line = "--" if " + " in name else "-"
        for ax, which in ((left, 0), (right, 1)):
            values = [point[which] for point in points.values()]
            ax.plot(list(points), values, line, color=colour, marker=mark, markersize=4, label=name)
    left.set(ylabel="evaluation time, ms")
    right.set(ylabel="peak memory, MB")
    lengths = sorted({n for points in curves.values() for n in points})
    for ax in (left, right):
        ax.set(xlabel="tokens (pixels)", xscale="log", yscale="log")
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.minorticks_off()
        ax.grid(alpha=0.5)
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside right center", fontsize=7, handlelength=4
    )
    figure.suptitle(machine, fontsize=8)
    return figure


def _heat(figure: Figure, ax: Axes, w: Tensor, **options: Any) -> None:
    # A few large weights near zero must not make the others invisible.
    limit = float(w.abs().flatten().quantile(0.995)) if w.numel() < 2**24 else float(w.abs().max())
    limit = limit or 1.0
    norm = AsinhNorm(limit / 50, -limit, limit)  # small ones are many: their pattern counts too
    shown = ax.imshow(w.numpy(), cmap=WEIGHTS_MAP, norm=norm, **options)
    ticks = {"ticks": [-limit, 0, limit], "format": "{x:.2g}"}
    figure.colorbar(shown, ax=ax, label="w", extend="both", pad=0.01, **ticks)


def _reach(w: Tensor) -> int:
    """The distance within which 99% of the squares of w lie."""
    reach = len(w) // 2
    squares = w.square()
    both = squares[reach:] + squares[: reach + 1].flip(0)
    return int((both.cumsum(0) < 0.99 * both.sum()).sum().clamp(max=reach))


def _looks() -> Iterator[tuple[str, str]]:
    # All colours with their marks, then with the next marks: 49 looks.
    turns = (MARKS[turn:] + MARKS[:turn] for turn in range(len(MARKS)))
    return cycle(look for marks in turns for look in zip(COLOURS, marks, strict=True))


_LOOKS = dict(zip(COLUMNS, _looks(), strict=False))  # of the positions, the same in every figure
