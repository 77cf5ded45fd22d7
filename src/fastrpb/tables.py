"""Tables as the paper has them: means over the seeds, by attention and position, in four forms."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

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


class Table(NamedTuple):
    """Cells with what they are called and which are better."""

    title: str
    cells: Cells
    better: Literal["high", "low"]


def tables_of(records: Sequence[dict[str, Any]]) -> list[Table]:
    """Accuracy, macro F1, time and memory, in the form of the paper's tables."""
    return [
        Table("Test accuracy, %", cells(records, on_test("accuracy")), "high"),
        Table("Test macro F1, %", cells(records, on_test("f1")), "high"),
        Table("Training time, s", cells(records, lambda r: r["seconds"]), "low"),
        Table("Peak memory, MiB", cells(records, lambda r: r["peak_memory_bytes"] / 2**20), "low"),
    ]


def ranks(table: Table) -> dict[tuple[str, str], int]:
    """1 for the best cell and 2 for the second; equal cells share a rank.

    >>> ranks(Table("", {("sikf", "none"): Cell(9, 0, 1), ("sikf", "rope"): Cell(7, 0, 1)}, "low"))
    {('sikf', 'none'): 2, ('sikf', 'rope'): 1}
    """
    values = sorted(
        {round(c.mean, 2) for c in table.cells.values()}, reverse=table.better == "high"
    )
    return {key: values.index(round(cell.mean, 2)) + 1 for key, cell in table.cells.items()}


def _marked(table: Table, marks: dict[int, str]) -> list[list[str]]:
    """The words of a table line by line, the best and the second in their marks."""
    place = ranks(table)
    return lines(table.cells, lambda key: marks.get(place[key], "%s") % str(table.cells[key]))


def as_markdown(table: Table) -> str:
    """A table in Markdown.

    >>> print(as_markdown(Table("%", {("sikf", "none"): Cell(92.5, 0.51, 3)}, "high")))
    %:
    <BLANKLINE>
    |  | None |
    | --- | --- |
    | Linear, SIKF | **92.50 ± 0.51** |
    <BLANKLINE>
    """
    head, *body = _marked(table, {1: "**%s**", 2: "<u>%s</u>"})
    words = [head, ["---"] * len(head), *body]
    return f"{table.title}:\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in words)


def as_latex(table: Table) -> str:
    r"""A table in LaTeX, as the paper has them: \textbf for the best, \uuline for the second."""
    head, *words = _marked(table, {1: r"\textbf{%s}", 2: r"\uuline{%s}"})
    body = "".join(f"  {' & '.join(line)} \\\\\n" for line in words).replace("±", r"$\pm$")
    return (
        f"% {table.title}\n\\begin{{tabular}}{{l{'c' * (len(head) - 1)}}}\n  \\toprule\n"
        f"  {' & '.join(head)} \\\\\n  \\midrule\n{body}  \\bottomrule\n\\end{{tabular}}\n"
    )


def as_html(table: Table) -> str:
    head, *lines = _marked(table, {1: "<b>%s</b>", 2: '<span class="second">%s</span>'})
    top = "".join(f'<th scope="col">{word}</th>' for word in head)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{word}</td>" for word in words)}</tr>'
        for name, *words in lines
    )
    return (
        f'<div class="wide"><table><caption>{table.title}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>\n"
    )
