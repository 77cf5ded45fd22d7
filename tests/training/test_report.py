import base64
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch

from fastrpb import FastRPB, FastRPB2d, load_model, save_model
from fastrpb.evaluate import load_run
from fastrpb.figures import (
    biases,
    curves_figure,
    gains_figure,
    scaling_figure,
    sides_figure,
    slice_figure,
    slice_of,
    weights_figure,
    weights_of,
)
from fastrpb.presets import name_of
from fastrpb.report import collect, write_report
from fastrpb.run import Run
from fastrpb.tables import Cell, Table, as_html, as_latex, as_markdown, ranks, tables_of
from fastrpb.train import train
from runs import record_of, small

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE = Table(
    "Test accuracy, %",
    {
        ("softmax", "rpe"): Cell(97.0, 0.1, 3),
        ("softmax", "none"): Cell(95.0, 0.2, 3),
        ("sikf", "none"): Cell(96.0, 0.0, 1),
    },
    "high",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds with a 1D bias, one with a 2D bias, one without, one cut off."""
    folder = tmp_path_factory.mktemp("runs")
    for position, seed in [("fastrpb", 0), ("fastrpb", 1), ("fastrpb2d", 0), ("none", 0)]:
        config = small(position=position, steps=20, eval_every=10, layers=3, seed=seed)
        train(config, folder / name_of(config), cpu=True)
    begun = Run(folder / "begun")
    begun.open(small())
    return folder


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    return write_report([runs], tmp_path_factory.mktemp("report"), pixel=(3, 2))


def test_the_best_is_bold_and_the_second_double_underlined():
    assert ranks(TABLE) == {("softmax", "rpe"): 1, ("softmax", "none"): 3, ("sikf", "none"): 2}
    assert "| Original | 95.00 ± 0.20 | **97.00 ± 0.10** |" in as_markdown(TABLE)
    assert "| Linear, SIKF | <u>96.00</u> | N/A |" in as_markdown(TABLE)
    assert r"Original & 95.00 $\pm$ 0.20 & \textbf{97.00 $\pm$ 0.10} \\" in as_latex(TABLE)
    assert r"Linear, SIKF & \uuline{96.00} & N/A \\" in as_latex(TABLE)
    assert "<td><b>97.00 ± 0.10</b></td>" in as_html(TABLE)
    assert '<td><span class="second">96.00</span></td><td>N/A</td>' in as_html(TABLE)


def test_less_time_is_better_and_equals_share_a_rank():
    cells = {
        ("sikf", "none"): Cell(2, 0, 1),
        ("elu1", "none"): Cell(2.001, 0, 1),
        ("relu", "none"): Cell(3, 0, 1),
    }
    assert list(ranks(Table("s", cells, "low")).values()) == [1, 1, 2]


@pytest.mark.parametrize(
    ("bias", "image"),
    [
        (FastRPB(2, 15), (3, 5)),
        (FastRPB2d(2, 3, 5), (3, 5)),
        (FastRPB2d(2, 5, 3, kind="full"), (5, 3)),
        (FastRPB(2, 15, causal=True), (3, 5)),
    ],
)
def test_a_slice_is_a_column_of_the_matrix(bias, image):
    matrix, weights = bias.matrix(15), weights_of(bias)
    for row in range(image[0]):
        for column in range(image[1]):
            expected = matrix[:, :, row * image[1] + column].unflatten(-1, image)
            torch.testing.assert_close(slice_of(weights, image, (row, column)), expected.detach())


def test_a_pixel_outside_is_refused():
    with pytest.raises(ValueError, match=r"pixel 3,0 is outside the image: rows 0 to 2"):
        slice_of(torch.zeros(1, 29), (3, 5), (3, 0))


def test_slices_show_heads_evenly_and_where_the_pixel_is():
    w = torch.randn(20, 5, 9)  # over 3×5 pixels
    axes = [ax for ax in slice_figure([w], (3, 5), (2, 1), heads=3).axes if ax.images]
    assert [ax.get_title() for ax in axes] == ["head 0", "head 10", "head 19"]
    pictures = slice_of(w, (3, 5), (2, 1))
    for ax, head in zip(axes, (0, 10, 19), strict=True):
        torch.testing.assert_close(torch.as_tensor(ax.images[0].get_array()), pictures[head])
        assert ([*ax.get_xticks()], [*ax.get_yticks()]) == ([1], [2])


def test_scaling_has_time_on_the_left_and_memory_on_the_right():
    figure = scaling_figure({"Original": {64: (1.0, 20.0), 128: (2.0, 40.0)}}, "a machine")
    left, right = figure.axes
    assert (left.get_ylabel(), right.get_ylabel()) == ("evaluation time, ms", "peak memory, MB")
    assert [list(ax.lines[0].get_ydata()) for ax in (left, right)] == [[1.0, 2.0], [20.0, 40.0]]


def test_figures_show_the_numbers():
    w = [torch.randn(4, 31), torch.randn(4, 31)]
    axes = [ax for ax in weights_figure(w).axes if ax.images]
    assert len(axes) == 2
    torch.testing.assert_close(torch.as_tensor(axes[1].images[0].get_array()), w[1])
    low, high = axes[0].images[0].get_clim()
    assert low == -high  # zero is white
    lines = [{"step": 1, "loss": 3.0}, {"step": 1, "validation": {"accuracy": 0.5}}]
    cells = [("sikf", "none"), ("sikf", "none"), ("sikf", "fastrpb"), ("softmax", "fastrpb")]
    left, right = curves_figure([(cell, lines) for cell in cells]).axes
    assert left.lines[0].get_ydata() == [3.0]
    assert right.lines[0].get_ydata() == [50.0]
    names = ["Linear, SIKF, None", "Linear, SIKF, FastRPB", "Original, FastRPB"]
    assert [text.get_text() for text in right.get_legend().get_texts()] == names
    none, again, fastrpb, softmax = left.lines
    assert none.get_color() == again.get_color() != fastrpb.get_color() == softmax.get_color()
    assert none.get_linestyle() == fastrpb.get_linestyle() != softmax.get_linestyle()
    gains = gains_figure({"digits": {cell: Cell(1.0, 0.0, 1) for cell in cells}})
    shown = [container.lines[0].get_color() for container in gains.axes[0].containers]
    assert shown == [none.get_color(), fastrpb.get_color()]


def test_gains_are_those_of_the_cells():
    cells = {("sikf", "none"): Cell(60.0, 0.0, 1), ("sikf", "fastrpb"): Cell(66.0, 0.5, 3)}
    figure = gains_figure({"text": cells, "digits": {("softmax", "none"): Cell(61.0, 0.0, 1)}})
    text, digits = figure.axes
    assert [ax.get_title() for ax in (text, digits)] == ["text", "digits"]
    assert [label.get_text() for label in text.get_yticklabels()] == ["Original", "Linear, SIKF"]
    none, fastrpb = text.containers
    assert [[*x] for x in none.lines[0].get_data()] == [[60.0], [1]]
    assert [[*x] for x in fastrpb.lines[0].get_data()] == [[66.0], [1]]
    assert fastrpb.lines[2][0].get_segments()[0][:, 0].tolist() == [65.5, 66.5]
    assert [[*x] for x in digits.containers[0].lines[0].get_data()] == [[61.0], [0]]
    words = [label.get_text() for label in figure.legends[0].get_texts()]
    assert words == ["None", "FastRPB"]


def test_the_heads_whose_sides_differ_most_are_shown():
    layers = [torch.randn(3, 101), torch.randn(3, 101)]
    step = torch.cat([torch.ones(50), torch.zeros(1), -torch.ones(50)])
    layers[1][2] = step + 0.1 * torch.randn(101)
    first, *others = sides_figure(layers).axes
    assert first.get_title() == "layer 2, head 2"
    assert len(others) == 3
    _, thin, mean = first.lines
    shown = torch.as_tensor(thin.get_ydata())
    reach = len(shown) // 2
    assert 45 < reach <= 50
    assert torch.equal(shown, layers[1][2][50 - reach : 51 + reach])
    torch.testing.assert_close(
        float(mean.get_ydata()[reach - 10]), float(shown[reach - 17 : reach - 2].mean())
    )
    assert len(sides_figure([torch.zeros(1, 3)]).axes) == 1  # of nothing, nothing breaks


def test_a_report_of_a_folder_of_runs(runs, report):
    names = {path.name for path in report.parent.iterdir()}
    records = {r.name: r.record for r in collect([runs]) if r.record}
    assert {
        "index.html",
        "tables.md",
        "tables.tex",
        "curves-digits.svg",
        "curves-digits.png",
        "gains.svg",
        "gains.png",
    } <= names
    for name, record in records.items():
        position = record["config"]["model"]["position"]
        for kind in ("weights", "sides"):
            assert (f"{kind}-{name}.svg" in names) == (position == "fastrpb")
        assert (f"slice-{name}.png" in names) == (position != "none")
    mean = (
        sum(100 * r["metrics"]["test"]["accuracy"] for n, r in records.items() if "fastrpb-" in n)
        / 2
    )
    assert f"{mean:.2f} ± " in (report.parent / "tables.md").read_text()
    content = report.read_text()
    assert "begun" in content
    assert "not finished" in content
    assert "$" not in re.sub(r"<script.*?</script>", "", content, flags=re.DOTALL)


def test_what_a_page_draws_from_are_the_weights(report, runs):
    data = json.loads(re.search(r'id="data">(.*?)</script>', report.read_text(), re.DOTALL)[1])
    assert len(data["runs"]) == 3
    for entry in data["runs"]:
        assert entry["image"] == [8, 8]
        _, model = load_run(runs / entry["name"])
        wanted = [weights_of(bias) for bias in biases(model)][: len(entry["layers"])]
        for layer, w in zip(entry["layers"], wanted, strict=True):
            wide = w.shape[-1] if w.dim() == 3 else 0
            assert (layer["heads"], layer["wide"]) == (len(w), wide)
            numbers = np.frombuffer(base64.b64decode(layer["weights"]), np.int16)
            shown = torch.tensor(numbers / 32767 * layer["scale"], dtype=torch.float32)
            error = layer["scale"] / 60_000
            torch.testing.assert_close(shown.view(w.shape), w, rtol=0, atol=error)


def test_tables_and_the_list_of_runs_show_the_record(tmp_path):
    record = {**record_of(small()), "revision": "0123456789abcdef"}
    tables = [(x.title, x.cells["sikf", "fastrpb"].mean, x.better) for x in tables_of([record])]
    assert tables == [
        ("Test accuracy, %", 50.0, "high"),
        ("Test macro F1, %", 25.0, "high"),
        ("Training time, s", 3.0, "low"),
        ("Peak memory, MiB", 7.0, "low"),
    ]
    (tmp_path / "results.jsonl").write_text(json.dumps(record) + "\n")
    page = write_report([tmp_path], tmp_path / "report").read_text()
    words = ("50.00", "25.00", "2", "3.0", "4,321", "7", "0123456789")
    cells = "".join(f"<td>{word}</td>" for word in words)
    assert f'<tr><th scope="row">x</th>{cells}</tr>' in page


def test_records_without_their_folders(runs, tmp_path):
    shutil.copy(runs / "results.jsonl", tmp_path)
    content = write_report([tmp_path], tmp_path / "report").read_text()
    assert "FastRPB 2D" in content
    assert [path.name for path in (tmp_path / "report").glob("*.svg")] == ["gains.svg"]


def test_folders_that_overlap_and_names_that_meet(runs, tmp_path):
    finished = [entry for entry in collect([runs]) if entry.record]
    again = collect([runs, runs, finished[0].run.folder])
    assert len(again) == len(collect([runs]))
    for folder in ("a", "b"):
        Run(tmp_path / folder / "begun").open(small())
    assert [e.name for e in collect([tmp_path / "a", tmp_path / "b"])] == ["begun", "begun-2"]


def test_names_cannot_break_the_page(tmp_path):
    name = "<!--<script> ü $title"
    train(small(steps=2), tmp_path / name, cpu=True)
    (tmp_path / name / "result.json").unlink()
    record = {"name": "x", "metrics": {"test": {"accuracy": 0, "f1": 0}}, "seconds": 1}
    record |= {"peak_memory_bytes": 1, "tokens_per_second": 1, "steps": 1, "revision": None}
    record |= {"device": "cpu", "versions": {"fastrpb": "1", "torch": "2"}}
    config = {"task": "<img src=x>", "model": {"attention": "linear", "features": "sikf"}}
    config["model"] |= {"position": "none", "image": None, "heads": 1}
    (tmp_path / "results.jsonl").write_text(json.dumps({**record, "config": config}) + "\n")
    content = write_report([tmp_path], tmp_path / "report").read_text()
    assert "<img src=x>" not in content
    assert "<!--<script>" not in content
    assert "&lt;img src=x&gt;" in content


def test_weights_that_are_no_numbers_are_left_out(tmp_path):
    config = small(steps=2)
    train(config, tmp_path / "run", cpu=True)
    model = load_model(tmp_path / "run" / "model.safetensors")
    with torch.no_grad():
        biases(model)[0].w[0, 0] = torch.nan
    save_model(model, tmp_path / "run" / "model.safetensors")
    content = write_report([tmp_path / "run"], tmp_path / "report").read_text()
    assert '"runs": []' in content


@pytest.mark.parametrize("distance", [-4000, -64, -3, 0, 1, 100, 4095])
def test_a_long_strip_shows_a_weight_at_its_distance(distance):
    w = torch.zeros(2, 8191)
    w[:, 4095 + distance] = 1.0
    (ax,) = [ax for ax in weights_figure([w]).axes if ax.images]
    (image,) = ax.images
    strip, (left, right, *_) = torch.as_tensor(image.get_array())[0], image.get_extent()
    assert len(strip) < 1000
    place = left + (strip.nonzero().float().mean().item() + 0.5) / len(strip) * (right - left)
    assert place == pytest.approx(math.copysign(math.log2(1 + abs(distance)), distance), abs=0.06)
    ticks = zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
    labels = {text.get_text(): x for x, text in ticks}
    assert {"-1024", "-4", "0", "64"} <= labels.keys()
    assert labels.get(str(distance), place) == pytest.approx(place, abs=0.06)


def test_two_set_ups_of_a_task_are_two_tables(runs, tmp_path):
    train(small(steps=2), tmp_path / "other", cpu=True)
    content = write_report([runs, tmp_path / "other"], tmp_path / "report").read_text()
    assert "<h2>digits</h2>" in content
    assert "<h2>digits 2</h2>" in content
    (note,) = re.findall(r"Unlike digits: (.*)\.</p>", content)
    assert note == "layers 3 → 2, steps 20 → 2, eval_every 10 → None"


def test_the_layer_that_is_not_read_is_not_shown(tmp_path):
    train(small(steps=2), tmp_path / "run", cpu=True)
    content = write_report([tmp_path / "run"], tmp_path / "report").read_text()
    (data,) = re.findall(r'^.*"runs": \[.*$', content, flags=re.MULTILINE)
    assert data.count('"weights": ') == 1  # of two layers


def test_a_file_of_records(runs):
    names = {entry.name for entry in collect([runs]) if entry.record}
    assert names
    assert {entry.name for entry in collect([runs / "results.jsonl"])} == names


def test_bad_input(tmp_path, runs):
    with pytest.raises(ValueError, match="there are no runs to report"):
        write_report([], tmp_path / "report")
    with pytest.raises(ValueError, match="there is no folder nothing"):
        write_report("nothing", tmp_path / "report")
    assert not (tmp_path / "report").exists()
    with pytest.raises(ValueError, match="there is no folder"):
        collect([tmp_path / "none"])
    with pytest.raises(ValueError, match=r"has no runs and no results.jsonl"):
        collect([tmp_path])
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    shutil.copy(runs / "results.jsonl", tmp_path / "runs" / "demo")
    with pytest.raises(ValueError, match=r"runs has no runs and .*; there are some in .*/demo$"):
        collect([tmp_path / "runs"])
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty.jsonl has no records of runs"):
        collect([tmp_path / "empty.jsonl"])
    (tmp_path / "weights").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="weights is no file of records: it is not text"):
        collect([tmp_path / "weights"])
    (tmp_path / "results.jsonl").write_text("{}\n")
    other = tmp_path / "other.json"
    other.write_text('{\n "no": "record"\n}\n')
    with pytest.raises(ValueError, match=r"other.json is no file of records such as results.jsonl"):
        collect([other])
    with pytest.raises(ValueError, match=r"results.jsonl: line 1 is no record of a run"):
        collect([tmp_path])


def test_a_file_that_is_no_bench(runs, tmp_path):
    for content in ("{}", "[1]", "x", '{"attention layer": [{"x": 1}], "machine": {}}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match="is no file of `fastrpb bench model`"):
            write_report([runs], tmp_path / "report", bench=tmp_path / "x.json")
    with pytest.raises(ValueError, match="pixel 9,9 is outside the image"):
        write_report([runs], tmp_path / "report", pixel=(9, 9))


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    assert chromium, "make test-browser needs Chromium: apt-get install chromium"
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


def opened(browser, report, **options):
    """The page, the requests it made and what went wrong."""
    page = browser.new_context(**options).new_page()
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda line: errors.append(line.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(report.as_uri())
    return page, requests, errors


def pixels(page, canvas):
    return page.evaluate(f"document.getElementById('{canvas}').toDataURL()")


@pytest.mark.browser
def test_the_page_renders_and_stays_at_home(browser, report):
    page, requests, errors = opened(browser, report)
    assert page.locator("#weights").is_visible()
    assert page.locator("table").count() == 5
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 100)")
    assert requests == [report.as_uri()]
    assert errors == []
    blocked = page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'blocked')")
    assert blocked == "blocked"


@pytest.mark.browser
def test_the_pickers_change_the_pictures(browser, report):
    page, _, errors = opened(browser, report)
    for picker, canvas in [("layer", "strips"), ("head", "line"), ("run", "strips")]:
        before = pixels(page, canvas)
        page.select_option(f"#{picker}", index=1)
        assert pixels(page, canvas) != before, picker
    before = pixels(page, "slice")
    page.locator("#slice").click(position={"x": 300, "y": 10})
    assert page.input_value("#row") == "0"
    assert page.input_value("#column") == "7"
    assert pixels(page, "slice") != before
    before = pixels(page, "slice")
    page.fill("#row", "5")
    page.press("#row", "Enter")
    assert pixels(page, "slice") != before
    page.locator("#strips").click(position={"x": 10, "y": 1})
    assert page.input_value("#head") == "0"
    page.locator("#strips").hover(position={"x": 400, "y": 1})
    assert "head 0, distance" in page.text_content("#strips-value")
    assert errors == []


@pytest.mark.browser
def test_the_slice_of_the_page_is_that_of_the_model(browser, report, runs):
    page, _, _ = opened(browser, report)
    for index, name in enumerate(page.locator("#run option").all_inner_texts()):
        page.select_option("#run", index=index)
        _, model = load_run(runs / name)
        picture = slice_of(weights_of(biases(model)[0]), (8, 8), (3, 2))[0]
        low, high = (
            float(x) for x in re.findall(r"-?\d[\d.e-]*", page.text_content("#slice-value"))[2:]
        )
        assert low == pytest.approx(float(picture.min()), rel=2e-2, abs=1e-3)
        assert high == pytest.approx(float(picture.max()), rel=2e-2, abs=1e-3)
        shown = page.evaluate(
            "[...Array(64).keys()].map(i => given(layer(), data.runs[state.run], i >> 3, i & 7))"
        )
        torch.testing.assert_close(torch.tensor(shown).view(8, 8), picture, rtol=0, atol=1e-4)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_dark_and_a_phone(browser, report, scheme):
    phone = {"width": 390, "height": 800}
    page, _, errors = opened(browser, report, viewport=phone, color_scheme=scheme, is_mobile=True)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390  # no sideways scrolling
    assert errors == []


def test_a_folder_comes_before_a_shipped_model_of_its_name(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs, "mnist")
    assert {entry.config["task"] for entry in collect(["mnist"])} == {"digits"}


def test_a_config_of_another_program_is_none_of_a_run(tmp_path):
    other = tmp_path / "models/bert/config.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    with pytest.raises(ValueError, match=r"has no runs and no results\.jsonl$"):
        collect([tmp_path])


def test_what_is_damaged_is_left_out_and_told(runs, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    first, second, third, *_ = sorted(file.parent for file in folder.glob("*/result.json"))
    (first / "config.json").write_text("{")
    (second / "model.safetensors").write_bytes(b"cut")
    (third / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.raises(ValueError, match=r"config\.json is not the config of a run"):
        write_report([folder], tmp_path / "report")
    told = []
    page = write_report([folder], tmp_path / "report", on_damaged=told.append)
    assert len(told) == 3
    for name in ("config.json", "metrics.jsonl", "model.safetensors"):
        assert sum(name in str(error) for error in told) == 1
    assert {entry.name for entry in collect([runs])} == {
        entry.name for entry in collect([folder], told.append)
    }  # the record of the first is in results.jsonl
    assert page.exists()
