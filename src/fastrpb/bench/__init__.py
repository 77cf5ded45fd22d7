"""Speed and memory on this machine: `fastrpb bench cpu|gpu|model` measures, prints and writes.

Ratios compare medians of runs that alternate in one process, so that a noisy machine slows both
sides. Peak memory is measured, on the CPU each point in a process of its own. The results go to
results/ with the machine's name.
"""

import json
from pathlib import Path

import torch

from fastrpb.bench.cpu import bench_cpu
from fastrpb.bench.gpu import bench_gpu
from fastrpb.bench.measure import device, machine, table
from fastrpb.bench.model import bench_model
from fastrpb.checks import check_choice
from fastrpb.files import replacing

BENCHES = {"cpu": bench_cpu, "model": bench_model, "gpu": bench_gpu}


def bench(name: str) -> Path:
    """Measure, print the tables and write them to results/NAME.json; layers on a GPU: model-gpu."""
    check_choice("benchmark", name, BENCHES)
    torch.manual_seed(0)
    tables = BENCHES[name]()
    for title, rows in tables.items():
        print(f"\n{title}\n\n{table(rows)}")
    suffix = "-gpu" if name == "model" and device() == "cuda" else ""
    path = Path("results") / f"{name}{suffix}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(json.dumps({"machine": machine(name), **tables}, indent=1) + "\n")
    return path
