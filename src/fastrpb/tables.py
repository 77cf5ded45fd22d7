"""Tables as the paper has them: means over the seeds, by attention and position."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fastrpb.presets import COLUMNS, ROWS, row


class Cell(NamedTuple):
    """A cell of a table, over its seeds."""

    mean: float
    std: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.runs < 2 else f"{self.mean:.2f} ± {self.std:.2f}"


Cells = dict[tuple[str, str], Cell]  # by row and column, as `ROWS` and `COLUMNS` have them


def lines(cells: Cells, mark: Callable[[tuple[str, str]], str] | None = None) -> list[list[str]]:
    """A table's words, its head first; what cannot be, or is not there, is N/A.

    >>> lines({("sikf", "none"): Cell(92.5, 0.51, 3)})
    [['', 'None'], ['Linear, SIKF', '92.50 ± 0.51']]
    """
    rows, columns = rows_and_columns(cells)
    words = mark or (lambda key: str(cells[key]))
    return [["", *(COLUMNS[column] for column in columns)]] + [
        [ROWS[name], *(words(key) if (key := (name, c)) in cells else "N/A" for c in columns)]
        for name in rows
    ]


def rows_and_columns(cells: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Of a table that has these cells, in the order of the paper's.

    >>> rows_and_columns([("sikf", "rope"), ("softmax", "none"), ("sikf", "none")])
    (['softmax', 'sikf'], ['none', 'rope'])
    """
    rows, columns = map(set, zip(*cells, strict=True))
    return [x for x in ROWS if x in rows], [x for x in COLUMNS if x in columns]


def on_test(metric: str) -> Callable[[dict[str, Any]], float]:
    """A metric of a record, in per cent."""
    return lambda record: 100 * record["metrics"]["test"][metric]


def cells(records: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> Cells:
    """Mean and standard deviation of a value of the records, for each row and column."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        model = record["config"]["model"]
        name = row(model["attention"], model["features"])
        values.setdefault((name, model["position"]), []).append(value(record))
    return {
        key: Cell(statistics.mean(x), statistics.stdev(x) if len(x) > 1 else 0.0, len(x))
        for key, x in values.items()
    }
