"""What the benchmarks compute from their measurements; the measurements themselves are results/."""

import json
import re
from pathlib import Path

import pytest
import torch

from fastrpb.bench import bench, gpu, measure
from fastrpb.bench.cpu import OPERATIONS, operation_cost
from fastrpb.bench.measure import against_length, growth, medians, peak_of, table
from fastrpb.bench.model import _crossings, _name, _pairs, layer_cost
from fastrpb.report import _bench_curves
from fastrpb.toeplitz import toeplitz

FULL = "forward+backward ms"
ROOT = Path(__file__).parents[1]


def quadratic(scale, n, backward):
    return scale * (1 + backward) * n**2, 10 * n


def test_costs_against_the_length_stop_where_patience_ends(monkeypatch):
    monkeypatch.setattr(measure, "apart", lambda function, *arguments: function(*arguments))
    rows = against_length(quadratic, 1e-6, [100, 200, 400, 800, 1600], patience=1.0)
    assert [row["length"] for row in rows] == [100, 200, 400]  # 800² µs, twice, is over a second
    assert rows[1][FULL] == pytest.approx(80)
    assert rows[1]["forward MB"] == pytest.approx(2e-3)
    assert growth(rows, FULL) == pytest.approx(2)
    assert growth(rows[:1], FULL) == "-"


def test_the_plain_way_is_right():
    w, v = torch.randn(3, 2 * 37 - 1), torch.randn(2, 3, 37, 5)
    torch.testing.assert_close(measure.plain_rfft(w, v), toeplitz(w) @ v, rtol=1e-4, atol=1e-4)


def test_only_the_cpu_needs_processes(monkeypatch):
    monkeypatch.setattr(measure, "apart", lambda *_: pytest.fail("a process was started"))
    assert len(against_length(quadratic, 1e-9, [100, 200], "cuda")) == 2


def test_a_section_is_a_row_for_every_point():
    assert gpu.rows("products", lambda a, b: {"ab": a * b}, [(2, 3), (4, 5)]) == [
        {"ab": 6},
        {"ab": 20},
    ]


def test_medians_take_turns():
    calls = []
    medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert calls == ["a", "b"] * 3


def test_the_peak_is_measured():
    assert 60e6 < peak_of(lambda: torch.zeros(16_000_000).add_(1)) < 80e6


def test_memory_that_was_kept_is_not_overlooked():
    pair = {"attention": "softmax", "features": "sikf", "position": "none"}
    _, peak = measure.apart(layer_cost, pair, 1024, False)
    assert peak > 4 * 1024 * 256  # at least the output


def test_on_cuda_the_peak_is_that_of_the_allocator(monkeypatch):
    bytes_at = {"now": 100, "peak": 900}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: bytes_at["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: bytes_at["peak"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda: bytes_at.update(peak=bytes_at["now"])
    )
    assert peak_of(lambda: bytes_at.update(peak=350), "cuda") == 250


def test_every_pair_once_and_none_that_cannot_be():
    names = [_name(pair) for pair in _pairs()]
    assert len(names) == len({*names}) == 39
    assert "Original + RPE" in names
    assert "Linear, SIKF + RPE" not in names


def test_where_linear_attention_wins():
    def rows(**times):
        return [{"length": int(n[1:]), FULL: t} for n, t in times.items()]

    measured = {
        "Original": rows(n256=1.0, n512=4.0, n1024=16.0, n2048=64.0, n4096=256.0),
        "Linear, SIKF": rows(n256=2.0, n512=3.0, n1024=6.0, n2048=9.0, n4096=20.0, n8192=40.0),
        "Linear, DPFP": rows(n256=2.0, n512=9.0, n1024=90.0),
    }
    wins = {row["layer"]: row["faster than softmax from N ="] for row in _crossings(measured)}
    assert wins == {"Linear, SIKF": 512, "Linear, DPFP": "-"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_run(name):
    seconds, _ = operation_cost(name, 64, backward=True)
    assert seconds > 0


@pytest.mark.parametrize("position", ["fastrpb", "fastrpb2d"])
def test_a_layer_runs(position):
    pair = {"attention": "linear", "features": "sikf", "position": position}
    assert all(layer_cost(pair, 32, backward)[0] > 0 for backward in (False, True))


def test_tables_and_unknown_names():
    assert table([{"a": 1, "b": 2.0}]) == "| a | b |\n| --- | --- |\n| 1 | 2.00 |"
    with pytest.raises(ValueError, match="unknown benchmark='modle'; did you mean model"):
        bench("modle")


def test_the_curves_of_the_figure(tmp_path):
    rows = [
        {"layer": name, "length": n, "forward ms": n / 10, "forward MB": n / 5}
        for name in ("Original", "Linear, SIKF + FastRPB", "Linear, SIKF + RoPE")
        for n in (256, 512)
    ]
    machine = {"cpu": "a processor", "torch": "2", "date": "today"}
    (tmp_path / "model.json").write_text(json.dumps({"machine": machine, "attention layer": rows}))
    curves, words = _bench_curves(tmp_path / "model.json")
    assert list(curves) == ["Original", "Linear, SIKF + FastRPB"]  # as in the paper's figure
    assert curves["Original"] == {256: (25.6, 51.2), 512: (51.2, 102.4)}
    assert words == "a processor, torch 2, today"


def page(name):
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def measured(name):
    return json.loads((ROOT / f"results/{name}.json").read_text())


def thousands(n):
    return f"{n:,}".replace(",", " ")


def times(*ratios):
    """Of a forward pass, and with its gradients."""
    forward, both = (f"{x:.1f}×" if x < 20 else f"{x:.0f}×" for x in ratios)
    return f"{forward} ({both})"


def test_the_readme_shows_what_the_gpu_took():
    lines, gpu = page("README.md"), measured("gpu")
    attention = {row["length"]: row for row in gpu["SIKF linear attention + FastRPB"]}
    both = gpu["W·V, forward+backward"]
    for forward, backward in zip(gpu["W·V, forward"], both, strict=True):
        length = forward["shape"][2]
        cells = [thousands(length), f"{forward['ms']:.2f} ms"]
        fft, plain = (times(forward[x], backward[x]) for x in ("fft /", "plain rfft /"))
        cells += [fft, f"{forward['called fft /']:.1f}×", plain]
        cells += [f"{forward['/ copy']:.1f}", f"{forward['extra memory / v']:.2f}"]
        flash = attention.get(length)
        names = ("flash / forward", "flash / forward+backward")
        cells.append(times(*(flash[x] for x in names)) if flash else "–")
        assert f"| {' | '.join(cells)} |" in lines


def test_the_page_shows_what_the_gpu_took():
    lines, gpu = page("docs/performance.md"), measured("gpu")
    for row in gpu["512 filters of one channel"]:
        cells = [str(row["batch"]), thousands(row["length"])]
        for peer in ("fft", "plain rfft"):
            cells.append(times(row[f"{peer} / forward"], row[f"{peer} / forward+backward"]))
        assert f"| {' | '.join(cells)} |" in lines
    for row in gpu["causal SIKF linear attention"]:
        took = f"{row['forward ms']:.2f} ({row['forward+backward ms']:.2f}) ms"
        cells = [thousands(row["length"]), took]
        for peer in ("plain torch", "flash"):
            cells.append(times(row[f"{peer} / forward"], row[f"{peer} / forward+backward"]))
        assert f"| {' | '.join(cells)} |" in lines


def shown(x):
    return f"{x:#.2g}".rstrip(".") if x < 99.5 else f"{float(f'{x:.3g}'):.0f}"


def test_the_page_shows_what_the_cpu_took():
    lines = page("docs/performance.md")
    for row in measured("cpu")["float32 product"]:
        shape, _, scipy, plain, backward, memory = row.values()
        ratios = f"{scipy:.1f}× | {plain:.1f}× | {backward:.1f} | {memory:.1f}"
        assert f"| ({', '.join(map(str, shape))}) | {ratios} |" in lines


def test_the_page_shows_what_layers_took():
    model = measured("model")
    lines = [x for x in page("docs/performance.md") if re.match(r"\| [A-Z].* ms, ", x)]
    assert len(lines) == 7
    costs = {(row["layer"], row["length"]): row for row in model["attention layer"]}
    growth = {row["layer"]: row["forward+backward"] for row in model["time ~ N^a"]}
    for line in lines:
        name, *cells, exponent = line.strip("| ").split(" | ")
        assert exponent == f"{growth[name]:.2f}"
        for length, cell in zip((512, 2048, 8192), cells, strict=True):
            if (name, length) not in costs:
                assert cell == "–"
                continue
            _, _, forward, _, both, memory = costs[name, length].values()
            assert cell == f"{shown(forward)} / {shown(both)} ms, {shown(memory)} MB"
