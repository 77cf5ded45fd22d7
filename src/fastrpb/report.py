"""What runs gave, as a page for people: the tables of the paper from their records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastrpb.compare import Cell, cells
from fastrpb.config import COLUMNS, ROWS
from fastrpb.files import replacing


def write_report(records: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write report.md: accuracy and macro F1, every run, and what they were computed with."""
    first = records[0]
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    parts = [
        f"# {first['config']['task']}\n\nOn test, in per cent: mean ± standard deviation.\n",
        f"Accuracy:\n\n{as_markdown(cells(records, 'accuracy'))}",
        f"Macro F1:\n\n{as_markdown(cells(records, 'f1'))}",
        f"Runs:\n\n{_runs(records)}",
        f"{first['device']}, {first['cores']} cores, {versions}, revision {first['revision']}.\n",
    ]
    path = folder / "report.md"
    with replacing(path) as part:
        part.write_text("\n".join(parts))
    return path


def as_markdown(table: dict[tuple[str, str], Cell]) -> str:
    """The cells as a table in Markdown; combinations that cannot be are N/A.

    >>> print(as_markdown({("sikf", "none"): Cell(92.5, 0.51, 3)}))
    |  | None |
    | --- | --- |
    | Linear, SIKF | 92.50 ± 0.51 |
    <BLANKLINE>
    """
    rows = [row for row in ROWS if any(row == key[0] for key in table)]
    columns = [column for column in COLUMNS if any(column == key[1] for key in table)]
    lines = [["", *(COLUMNS[column] for column in columns)], ["---"] * (len(columns) + 1)]
    for row in rows:
        lines.append([ROWS[row], *(str(table.get((row, column), "N/A")) for column in columns)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _runs(records: Sequence[dict[str, Any]]) -> str:
    lines = [["run", "test accuracy", "macro F1", "seconds", "peak MiB"], ["---"] * 5]
    for record in records:
        test = record["metrics"]["test"]
        numbers = [f"{100 * test['accuracy']:.2f}", f"{100 * test['f1']:.2f}"]
        numbers += [f"{record['seconds']:.1f}", f"{record['peak_memory_bytes'] / 2**20:.0f}"]
        lines.append([record["name"], *numbers])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
