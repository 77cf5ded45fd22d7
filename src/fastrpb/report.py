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
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from io import BytesIO
from itertools import chain, count
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, NoReturn, TypeVar

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fastrpb import figures
from fastrpb.config import changes, completed, flat, to_json
from fastrpb.evaluate import load_run
from fastrpb.files import reason_of, replacing, shipped_or
from fastrpb.presets import CELL, COLUMNS, ROWS, row
from fastrpb.records import read_records, same_config
from fastrpb.run import Run
from fastrpb.tables import Table, as_html, as_latex, as_markdown, tables_of

_T = TypeVar("_T")
_PIXEL = (12, 10)  # the paper's
_OF_A_CELL = (*CELL, "absolute", "learning_rate", "seed")
_MOST_WEIGHTS = 2_000_000  # of a page: beyond, a run shows its first heads alone


@dataclass(frozen=True)
class Entry:
    """A run: its config, its record if it is finished, its folder if it is there."""

    name: str
    config: dict[str, Any]
    record: dict[str, Any] | None
    run: Run | None


def _refuse(error: ValueError) -> NoReturn:
    raise error


def write_report(
    folders: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    pixel: tuple[int, int] | None = None,
    bench: str | Path | None = None,
    on_damaged: Callable[[ValueError], None] = _refuse,
) -> Path:
    """Write the page, the tables and the figures of some runs; gives the page's path.

    Args:
        folders: of runs, folders that hold runs and their results.jsonl, or such files; or one.
        out: the folder to write to.
        pixel: row and column of the pixel in the pictures of images, where it must lie inside all;
            default: 12, 10 as in the paper, or the nearest. The page lets one pick others.
        bench: a file of `fastrpb bench model`, for time and memory against the length.
        on_damaged: called with what is wrong with a part of a run that can be left out; by default
            it is raised.
    """
    folders = [folders] if isinstance(folders, str | Path) else folders
    entries = collect(folders, on_damaged)
    scaling = {}
    if bench is not None:
        scaling["scaling"] = partial(figures.scaling_figure, *_bench_curves(Path(bench)))
    if not entries:
        raise ValueError("there are no runs to report")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    groups = set_ups(entries)
    weights = [
        (e, _unless_damaged(partial(_weights, e.run), [], on_damaged)) for e in entries if e.run
    ]
    shown = [(e, layers) for e, layers in weights if layers]
    for entry, layers in shown:
        for name, draw in _weight_figures(entry, layers, pixel).items():
            _write_figure(out / name, draw)
    records = [entry.record for entry in entries if entry.record]
    finished = {t: [e.record for e in group if e.record] for t, group in groups.items()}
    tables = {title: tables_of(group) for title, group in finished.items() if group}
    notes = _notes(groups)
    _write(out / "tables.md", _document(tables, notes, MARKDOWN))
    _write(out / "tables.tex", _document(tables, notes, LATEX))
    page = Template(files("fastrpb").joinpath("report.html").read_text()).substitute(
        title=html.escape(f"fastrpb: {', '.join(groups)}"),
        facts=html.escape(_facts(records)),
        tables=_document(tables, notes, HTML),
        gains=_section("What positions add", _gains(tables), out),
        curves=_section("Training", _curves(groups, on_damaged), out),
        scaling=_section("Time and memory", scaling, out),
        runs=_runs(entries),
        data=_data(shown, pixel or _PIXEL),
    )
    _write(out / "index.html", page)
    return out / "index.html"


def collect(
    folders: Iterable[str | Path], on_damaged: Callable[[ValueError], None] = _refuse
) -> list[Entry]:
    """The runs of some folders, by name: finished ones, and those that are still trained."""
    entries: dict[tuple[str, ...], Entry] = {}
    for folder in map(Path, folders):
        folder = folder if folder.exists() else shipped_or(folder)  # noqa: PLW2901
        if not folder.exists():
            raise ValueError(f"there is no folder {folder}")
        found = list(_entries(folder, on_damaged) if folder.is_dir() else _recorded(folder))
        if not found:
            if not folder.is_dir():
                raise ValueError(f"{folder} has no records of runs")
            inside = [str(x) for x in sorted(folder.iterdir()) if (x / "results.jsonl").exists()]
            hint = f"; there are some in {', '.join(inside)}" if inside else ""
            raise ValueError(f"{folder} has no runs and no results.jsonl{hint}")
        for entry in found:
            # Finished, a run is its config and its data; unfinished, its folder.
            where = "" if entry.record or not entry.run else str(entry.run.folder.resolve())
            key = (same_config(entry.config), _digest(entry) or "", where)
            if key not in entries or entries[key].run is None:
                entries[key] = entry
    # Older records do not say what data they are of: those of the same config are taken for theirs.
    told = {key[0]: key for key in entries if key[1]}
    for key, entry in [*entries.items()]:
        same = told.get(key[0])
        if entry.record and not key[1] and same:
            entries[same] = replace(entries[same], run=entries[same].run or entry.run)
            del entries[key]
    unique: dict[str, Entry] = {}
    for entry in entries.values():
        numbered = (f"{entry.name}-{number}" for number in count(2))
        name = next(name for name in chain([entry.name], numbered) if name not in unique)
        unique[name] = replace(entry, name=name)
    return list(unique.values())


def _entries(folder: Path, on_damaged: Callable[[ValueError], None]) -> Iterator[Entry]:
    if Run(folder).exists():
        yield _entry(Run(folder))
        return
    for run in map(Run, sorted(folder.iterdir())):
        if _unless_damaged(run.exists, False, on_damaged):
            entry = _unless_damaged(partial(_entry, run), None, on_damaged)
            if entry:
                yield entry
    yield from _recorded(folder / "results.jsonl")


def _entry(run: Run) -> Entry:
    record, config = run.result(), run.config()
    if record:
        run.check(record["config"], config)
    name = record["name"] if record else run.folder.resolve().name
    return Entry(name, json.loads(to_json(config)), record, run)


def _unless_damaged(
    part: Callable[[], _T], nothing: _T, on_damaged: Callable[[ValueError], None]
) -> _T:
    try:
        return part()
    except (OSError, ValueError) as error:
        on_damaged(ValueError(reason_of(error)))
        return nothing


def _recorded(file: Path) -> Iterator[Entry]:
    for record in read_records(file):
        yield Entry(record["name"], record["config"], record, None)


class Form(NamedTuple):
    """How a document is written: the heading of a set-up, a word on its tables, a table."""

    heading: str
    note: str
    table: Callable[[Table], str]
    escape: Callable[[str], str] = str


_NOTE = "Mean ± standard deviation over the seeds; best bold, second {}underlined."
MARKDOWN = Form("# {}\n", _NOTE.format("") + "{}\n", as_markdown)
LATEX = Form("% {}\n", "% " + _NOTE.format("double-") + "{}\n", as_latex)
HTML = Form("<h2>{}</h2>", f"<p>{_NOTE.format('double-')}{{}}</p>", as_html, html.escape)


def _document(tables: dict[str, list[Table]], notes: dict[str, str], form: Form) -> str:
    parts = [
        (
            form.heading.format(form.escape(title)),
            form.note.format(form.escape(notes[title])),
            *map(form.table, group),
        )
        for title, group in tables.items()
    ]
    return "\n".join(line for part in parts for line in part)


def set_ups(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Runs that belong into one table: the same but for row, column and seed, on the same data.

    Presets may differ between cells in learning rate and absolute positions; within a cell all but
    the seed is equal.
    """
    groups: list[tuple[str, dict[str, str], list[Entry]]] = []
    for entry in entries:
        rest = completed(entry.config)
        model = rest.pop("model")
        cell = json.dumps([model.pop(name) for name in CELL])
        own = json.dumps([model.pop("absolute"), rest.pop("learning_rate")])
        del rest["seed"]
        key, digest = json.dumps([rest, model], sort_keys=True), _digest(entry)
        facts = {cell: own, **({"data": digest} if digest else {})}
        for known, shared, group in groups:
            if known == key and all(shared.get(name, x) == x for name, x in facts.items()):
                shared.update(facts)
                group.append(entry)
                break
        else:
            groups.append((key, facts, [entry]))
    groups.sort(key=lambda group: not any(entry.record for entry in group[2]))  # finished first
    titles: dict[str, list[Entry]] = {}
    for _, _, group in groups:
        task = group[0].config["task"]
        number = 1 + sum(other[0].config["task"] == task for other in titles.values())
        titles[task if number == 1 else f"{task} {number}"] = group
    return titles


def _notes(groups: dict[str, list[Entry]]) -> dict[str, str]:
    """In what the second and further set-ups of a task differ from its first."""
    notes: dict[str, str] = {}
    first: dict[str, list[dict[str, Any]]] = {}
    for title, group in groups.items():
        these = [{**flat(completed(e.config)), "data": _digest(e)} for e in group]
        task = these[0]["task"]
        those = first.setdefault(task, these)
        # Of the same cell where both have one: its own fields can then be what differs.
        same = [(a, b) for a in those for b in these if all(a[x] == b[x] for x in CELL)]
        own = ("seed",) if same else _OF_A_CELL
        pair = same[0] if same else (those[0], these[0])
        if None in (pair[0]["data"], pair[1]["data"]):
            own = (*own, "data")
        old, new = ({name: x for name, x in fields.items() if name not in own} for fields in pair)
        changed = ", ".join(changes(old, new))
        notes[title] = f" Unlike {task}: {changed}." if changed else ""
    return notes


def _gains(tables: dict[str, list[Table]]) -> dict[str, Callable[[], Figure]]:
    """A figure of the set-ups that have several positions, if any does."""
    accuracy = {title: group[0].cells for title, group in tables.items()}
    compared = {title: of for title, of in accuracy.items() if len({c for _, c in of}) > 1}
    return {"gains": partial(figures.gains_figure, compared)} if compared else {}


def _curves(
    groups: dict[str, list[Entry]], on_damaged: Callable[[ValueError], None]
) -> dict[str, Callable[[], Figure]]:
    """A figure for each set-up whose runs are there."""
    drawn = {}
    for title, group in groups.items():
        lines = [
            (_cell(e.config), _unless_damaged(e.run.metrics, [], on_damaged))
            for e in group
            if e.run
        ]
        if any(points for _, points in lines):
            name = re.sub(r"\W+", "-", f"curves-{title}")
            drawn[name] = partial(figures.curves_figure, lines)
    return drawn


def _digest(entry: Entry) -> str | None:
    """The digest of a finished run's data; older versions wrote none."""
    return entry.record.get("data") if entry.record else None


def _cell(config: dict[str, Any]) -> tuple[str, str]:
    """Row and column of a run in the tables."""
    model = config["model"]
    return row(model["attention"], model["features"]), model["position"]


def _weights(run: Run) -> list[Tensor]:
    """The weights of the bias of every layer that reads it, if there are any to be drawn."""
    if not run.model_file.exists() and not run.steps():
        return []
    config, model = load_run(run.folder)
    layers = [figures.weights_of(bias) for bias in figures.biases(model)]
    if config.model.pooling == "cls":
        layers = layers[:-1]  # of the last layer CLS alone is read, which gets no bias
    return layers if all(w.isfinite().all() for w in layers) else []


def _image(entry: Entry) -> tuple[int, int] | None:
    height_width = entry.config["model"]["image"]
    return tuple(height_width) if height_width else None


def _word(entry: Entry, layers: list[Tensor]) -> str:
    """What a set of weights belongs to: a head, or a filter where there are other numbers."""
    return "head" if len(layers[0]) == entry.config["model"]["heads"] else "filter"


def _inside(pixel: tuple[int, int] | None, image: tuple[int, int]) -> tuple[int, int]:
    return pixel or (min(_PIXEL[0], image[0] - 1), min(_PIXEL[1], image[1] - 1))


def _weight_figures(
    entry: Entry, layers: list[Tensor], pixel: tuple[int, int] | None
) -> dict[str, Callable[[], Figure]]:
    drawn: dict[str, Callable[[], Figure]] = {}
    word, image = _word(entry, layers), _image(entry)
    if layers[0].dim() == 2:
        drawn[f"weights-{entry.name}"] = partial(figures.weights_figure, layers, word)
        drawn[f"sides-{entry.name}"] = partial(figures.sides_figure, layers, word)
    if image:
        drawn[f"slice-{entry.name}"] = partial(
            figures.slice_figure, layers, image, _inside(pixel, image), word
        )
    return drawn


def _bench_curves(path: Path) -> tuple[dict[str, dict[int, tuple[float, float]]], str]:
    """Evaluation time and memory by layer and length, of a file of `fastrpb bench model`."""
    curves: dict[str, dict[int, tuple[float, float]]] = {}
    wanted = {name + end for name in ROWS.values() for end in ("", f" + {COLUMNS['fastrpb']}")}
    try:
        content = json.loads(path.read_text())
        for row in content["attention layer"]:
            if row["layer"] in wanted:
                point = row["forward ms"], row["forward MB"]
                curves.setdefault(row["layer"], {})[row["length"]] = point
        machine = content["machine"]
        device = machine.get("gpu") or machine["cpu"]
        words = f"{device}, torch {machine['torch']}, {machine['date']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        curves, words = {}, ""
    if not curves:
        raise ValueError(f"{path} is no file of `fastrpb bench model`")
    return curves, words


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
        heads = max(1, min(len(layers[0]), budget // max(1, sum(w[0].numel() for w in layers))))
        packed = [_packed(w[:heads]) for w in layers]
        word = _word(entry, layers)
        facts = {"name": entry.name, "image": _image(entry), "word": word, "of": len(layers[0])}
        runs.append({**facts, "layers": packed})
    colours = (mpl.colormaps[figures.WEIGHTS_MAP](range(256))[:, :3] * 255).round().astype(int)
    data = {"runs": runs, "pixel": pixel, "colours": colours.tolist()}
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # inside a script


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
