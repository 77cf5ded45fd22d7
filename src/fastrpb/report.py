"""What runs gave, for people to look at: one HTML page, figures, and tables for papers.

report/
  index.html       everything, self-contained: no request leaves it
  tables.md        the tables in Markdown
  tables.tex       and in LaTeX, best bold, second double-underlined (needs ulem)
  *.svg, *.png     the figures
"""

import base64
import html
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fastrpb import figures
from fastrpb.compare import Cells, cells, on_test
from fastrpb.config import COLUMNS, ROWS
from fastrpb.files import replacing
from fastrpb.run import Run, read_lines
from fastrpb.train import load_run

_MOST_WEIGHTS = 2_000_000  # of a page: beyond, a run shows its first heads alone


@dataclass(frozen=True)
class Entry:
    """A run: its record if it is finished, its folder if it is there."""

    name: str
    record: dict[str, Any] | None
    run: Run | None


class Table(NamedTuple):
    """Cells with what they are called and which are better."""

    title: str
    cells: Cells
    better: Literal["high", "low"]


def write_report(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    pixel: tuple[int, int] = (12, 10),
    bench: str | Path | None = None,
) -> Path:
    """Write the page, the tables and the figures of some runs; gives the page's path.

    Args:
        folders: of runs, or folders that hold runs and their results.jsonl.
        out: the folder to write to.
        pixel: row and column of the pixel in the pictures of images; the page lets one pick others.
        bench: a file of `fastrpb bench model`, for time and memory against the length.
    """
    entries = collect(folders)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    records = [entry.record for entry in entries if entry.record]
    groups = _set_ups(records)
    curves, scaling = {}, {}
    for title, group in groups.items():
        lines = [
            (_cell_name(e.record), e.run.metrics()) for e in entries if e.run and e.record in group
        ]
        if lines:
            curves[f"curves-{title}"] = partial(figures.curves_figure, lines)
    if bench is not None:
        scaling["scaling"] = partial(figures.scaling_figure, *_bench_curves(Path(bench)))
    shown = [(e, layers) for e in entries if e.run and (layers := _weights(e.run))]
    for entry, layers in shown:
        for name, draw in _weight_figures(entry, layers, pixel).items():
            _write_figure(out / name, draw)
    tables = {title: tables_of(group) for title, group in groups.items()}
    _write(out / "tables.md", _document(tables, MARKDOWN))
    _write(out / "tables.tex", _document(tables, LATEX))
    page = Template(files("fastrpb").joinpath("report.html").read_text()).substitute(
        title="fastrpb: " + (", ".join(groups) or "runs"),
        facts=html.escape(_facts(records)),
        tables=_document(tables, HTML),
        curves=_section("Training", curves, out),
        scaling=_section("Time and memory", scaling, out),
        runs=_runs(entries),
        data=_data(shown, pixel),
    )
    _write(out / "index.html", page)
    return out / "index.html"


def collect(folders: Iterable[str | Path]) -> list[Entry]:
    """The runs of some folders, by name: finished ones, and those that are still trained."""
    entries: dict[tuple[str, str], Entry] = {}

    def add(record: dict[str, Any] | None, run: Run | None, name: str) -> None:
        key = (name, json.dumps(record["config"], sort_keys=True) if record else str(run))
        if key not in entries or entries[key].run is None:
            entries[key] = Entry(name, record, run)

    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        runs = [folder] if Run(folder).exists() else sorted(folder.iterdir())
        before = len(entries)
        for run in (Run(path) for path in runs if Run(path).exists()):
            record = run.result()
            add(record, run, record["name"] if record else run.folder.name)
        if not Run(folder).exists():
            for record in read_lines(folder / "results.jsonl"):
                add(record, None, record["name"])
        if len(entries) == before:
            raise ValueError(f"{folder} has no runs and no results.jsonl")
    return list(entries.values())


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

    >>> from fastrpb.compare import Cell
    >>> ranks(Table("", {("sikf", "none"): Cell(9, 0, 1), ("sikf", "rope"): Cell(7, 0, 1)}, "low"))
    {('sikf', 'none'): 2, ('sikf', 'rope'): 1}
    """
    values = sorted(
        {round(c.mean, 2) for c in table.cells.values()}, reverse=table.better == "high"
    )
    return {key: values.index(round(cell.mean, 2)) + 1 for key, cell in table.cells.items()}


def _grid(table: Table, mark: Callable[[str, int], str]) -> list[list[str]]:
    """The words of a table line by line, each cell marked by its rank."""
    rows = [row for row in ROWS if any(row == key[0] for key in table.cells)]
    columns = [column for column in COLUMNS if any(column == key[1] for key in table.cells)]
    place = ranks(table)
    lines = [["", *(COLUMNS[column] for column in columns)]]
    for row in rows:
        keys = [(row, column) for column in columns]
        words = [mark(str(table.cells[k]), place[k]) if k in place else "N/A" for k in keys]
        lines.append([ROWS[row], *words])
    return lines


def as_markdown(table: Table) -> str:
    """A table in Markdown.

    >>> from fastrpb.compare import Cell
    >>> print(as_markdown(Table("%", {("sikf", "none"): Cell(92.5, 0.51, 3)}, "high")))
    %:
    <BLANKLINE>
    |  | None |
    | --- | --- |
    | Linear, SIKF | **92.50 ± 0.51** |
    <BLANKLINE>
    """
    marks = {1: "**{}**", 2: "<u>{}</u>"}
    head, *lines = _grid(table, lambda words, rank: marks.get(rank, "{}").format(words))
    lines = [head, ["---"] * len(head), *lines]
    return f"{table.title}:\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_latex(table: Table) -> str:
    r"""A table in LaTeX, as the paper has them: \textbf for the best, \uuline for the second."""
    marks = {1: r"\textbf{%s}", 2: r"\uuline{%s}"}

    def mark(words: str, rank: int) -> str:
        return marks.get(rank, "%s") % words.replace("±", r"$\pm$")

    head, *lines = _grid(table, mark)
    body = "".join(f"  {' & '.join(line)} \\\\\n" for line in lines)
    return (
        f"% {table.title}\n\\begin{{tabular}}{{l{'c' * (len(head) - 1)}}}\n  \\toprule\n"
        f"  {' & '.join(head)} \\\\\n  \\midrule\n{body}  \\bottomrule\n\\end{{tabular}}\n"
    )


def as_html(table: Table) -> str:
    marks = {1: "<b>{}</b>", 2: '<span class="second">{}</span>'}
    head, *lines = _grid(table, lambda words, rank: marks.get(rank, "{}").format(words))
    top = "".join(f'<th scope="col">{word}</th>' for word in head)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{word}</td>" for word in words)}</tr>'
        for name, *words in lines
    )
    return (
        f'<div class="wide"><table><caption>{table.title}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>\n"
    )


class Form(NamedTuple):
    """How a document is written: the heading of a set-up, a word on its tables, a table."""

    heading: str
    note: str
    table: Callable[[Table], str]


_NOTE = "Mean ± standard deviation over the seeds; best bold, second {}underlined."
MARKDOWN = Form("# {}\n", _NOTE.format("") + "\n", as_markdown)
LATEX = Form("% {}\n", "% " + _NOTE.format("double-") + "\n", as_latex)
HTML = Form("<h2>{}</h2>", f"<p>{_NOTE.format('double-')}</p>", as_html)


def _document(tables: dict[str, list[Table]], form: Form) -> str:
    parts = [
        (form.heading.format(title), form.note, *map(form.table, group))
        for title, group in tables.items()
    ]
    return "\n".join(line for part in parts for line in part)


def _set_ups(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Records that belong into one table: the same task, and the same but for row, column, seed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        config = {**record["config"]}
        model = {**config.pop("model")}
        for name in ("attention", "features", "position", "absolute"):
            model.pop(name)
        for name in ("seed", "learning_rate"):
            config.pop(name)
        groups.setdefault(json.dumps([config, model], sort_keys=True), []).append(record)
    titles: dict[str, list[dict[str, Any]]] = {}
    for group in groups.values():
        task = group[0]["config"]["task"]
        number = sum(title.split(" ")[0] == task for title in titles)
        titles[f"{task} {number + 1}" if number else task] = group
    return titles


def _cell_name(record: dict[str, Any]) -> str:
    ((row, column),) = cells([record], lambda _: 0.0)
    return f"{ROWS[row]}, {COLUMNS[column]}"


def _weights(run: Run) -> list[Tensor]:
    """The weights of every layer's bias, or nothing where there is none."""
    if not run.model_file.exists() and not run.steps():
        return []
    _, model = load_run(run.folder)
    return [figures.weights_of(bias) for bias in figures.biases(model)]


def _image(run: Run) -> tuple[int, int] | None:
    return run.config().model.image


def _weight_figures(
    entry: Entry, layers: list[Tensor], pixel: tuple[int, int]
) -> dict[str, Callable[[], Figure]]:
    assert entry.run is not None
    drawn: dict[str, Callable[[], Figure]] = {}
    if layers[0].dim() == 2:
        drawn[f"weights-{entry.name}"] = partial(figures.weights_figure, layers)
    image = _image(entry.run)
    if image:
        inside = (min(pixel[0], image[0] - 1), min(pixel[1], image[1] - 1))
        drawn[f"slice-{entry.name}"] = partial(figures.slice_figure, layers, image, inside)
    return drawn


def _bench_curves(path: Path) -> tuple[dict[str, dict[int, tuple[float, float]]], str]:
    """Evaluation time and memory by layer and length, of a file of `fastrpb bench model`."""
    try:
        content = json.loads(path.read_text())
        rows, machine = content["attention layer"], content["machine"]
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{path} is no file of `fastrpb bench model`") from None
    curves: dict[str, dict[int, tuple[float, float]]] = {}
    wanted = {name + end for name in ROWS.values() for end in ("", f" + {COLUMNS['fastrpb']}")}
    for row in rows:
        if row["layer"] in wanted:
            point = row["forward ms"], row["forward MB"]
            curves.setdefault(row["layer"], {})[row["length"]] = point
    device = machine.get("gpu") or machine["cpu"]
    return curves, f"{device}, torch {machine['torch']}, {machine['date']}"


def _svg(draw: Callable[[], Figure], dark: bool) -> tuple[Figure, bytes]:
    with figures.style(dark):
        figure, content = draw(), BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    return figure, content.getvalue()


def _write_figure(path: Path, draw: Callable[[], Figure]) -> bytes:
    """Write SVG and PNG; give the SVG."""
    figure, content = _svg(draw, dark=False)
    _write(Path(f"{path}.svg"), content)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=200, facecolor="white")
    _write(Path(f"{path}.png"), picture.getvalue())
    return content


def _section(title: str, drawn: dict[str, Callable[[], Figure]], out: Path) -> str:
    """Write figures, and put them into the page, for a light ground and for a dark one."""
    pictures = ""
    for name, draw in drawn.items():
        light = base64.b64encode(_write_figure(out / name, draw)).decode()
        dark = base64.b64encode(_svg(draw, dark=True)[1]).decode()
        pictures += (
            '<figure><picture><source media="(prefers-color-scheme: dark)" '
            f'srcset="data:image/svg+xml;base64,{dark}"><img alt="{html.escape(name)}" '
            f'src="data:image/svg+xml;base64,{light}"></picture></figure>'
        )
    return f"<section><h2>{title}</h2>{pictures}</section>" if pictures else ""


def _facts(records: Sequence[dict[str, Any]]) -> str:
    """What the runs were computed on and with."""
    kinds = {
        f"{r['device']}, fastrpb {r['versions']['fastrpb']}, torch {r['versions']['torch']}"
        for r in records
    }
    return f"{len(records)} finished runs on {'; '.join(sorted(kinds))}." if records else ""


def _runs(entries: Sequence[Entry]) -> str:
    head = ("run", "test accuracy, %", "macro F1, %", "steps", "s", "tokens/s", "MiB", "revision")
    lines = []
    for entry in entries:
        record = entry.record
        if record is None:
            lines.append([entry.name, "not finished", *[""] * (len(head) - 2)])
            continue
        test = record["metrics"]["test"]
        scores = [f"{100 * test['accuracy']:.2f}", f"{100 * test['f1']:.2f}"]
        sizes = [f"{record['steps']:,}", f"{record['seconds']:.1f}"]
        sizes += [
            f"{record['tokens_per_second']:,.0f}",
            f"{record['peak_memory_bytes'] / 2**20:,.0f}",
        ]
        lines.append([entry.name, *scores, *sizes, (record["revision"] or "")[:10]])
    top = "".join(f'<th scope="col">{word}</th>' for word in head)
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        f"{''.join(f'<td>{html.escape(word)}</td>' for word in words)}</tr>"
        for name, *words in lines
    )
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<section><h2>Runs</h2><div class="wide">{table}</div></section>'


def _data(shown: Sequence[tuple[Entry, list[Tensor]]], pixel: tuple[int, int]) -> str:
    """What the page draws from, as JSON: weights in 16 bits, and the colours from -1 to 1."""
    budget = _MOST_WEIGHTS // max(1, len(shown))
    runs = []
    for entry, layers in shown:
        assert entry.run is not None
        heads = max(1, min(len(layers[0]), budget // max(1, sum(w[0].numel() for w in layers))))
        packed = [_packed(w[:heads]) for w in layers]
        runs.append({"name": entry.name, "image": _image(entry.run), "layers": packed})
    colours = (mpl.colormaps[figures.WEIGHTS_MAP](range(256))[:, :3] * 255).round().astype(int)
    data = {"runs": runs, "pixel": pixel, "colours": colours.tolist()}
    return json.dumps(data).replace("</", "<\\/")  # inside a script


def _packed(w: Tensor) -> dict[str, Any]:
    scale = float(w.abs().max()) or 1.0
    numbers = (w / scale * 32767).round().to(torch.int16)
    limit = float(w.abs().flatten()[:10_000_000].quantile(0.995)) or scale
    return {
        "heads": len(w),
        "wide": w.shape[-1] if w.dim() == 3 else 0,
        "scale": scale,
        "limit": limit,
        "weights": base64.b64encode(numbers.contiguous().numpy().tobytes()).decode(),
    }


def _write(path: Path, content: str | bytes) -> None:
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
