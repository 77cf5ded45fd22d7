"""The folder of a run, and the file of results beside it. Whatever ends a process, both stay whole.

runs/
  results.jsonl            a line for every finished run
  digits-sikf-fastrpb-s0/
    config.json            what the run computes
    checkpoints/           the state of the last two saves, while it trains
    metrics.jsonl          loss and accuracy against the step
    model.safetensors      the trained model, for `fastrpb.load_model`
    result.json            its line of results.jsonl
"""

import json
import os
import platform
import resource
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastrpb import __version__
from fastrpb.config import RunConfig, differences, load_config, to_json
from fastrpb.files import replacing

KEPT = 2  # checkpoints


class Run:
    """The files of one run in its folder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config_file = self.folder / "config.json"
        self.model_file = self.folder / "model.safetensors"
        self.result_file = self.folder / "result.json"
        self.metrics_file = self.folder / "metrics.jsonl"
        self.checkpoints = self.folder / "checkpoints"
        self.results_file = self.folder.parent / "results.jsonl"

    def exists(self) -> bool:
        return self.config_file.exists()

    def config(self) -> RunConfig:
        if not self.exists():
            raise ValueError(f"{self.folder} is no run: it has no config.json")
        return load_config(self.config_file)

    def open(self, config: RunConfig) -> None:
        """Make the folder, or check that it belongs to the same config."""
        if self.exists():
            changed = differences(self.config(), config)
            if changed:
                raise ValueError(
                    f"{self.folder} was begun with another config: {'; '.join(changed)}; "
                    "resume without these changes, or choose another folder by --out"
                )
            return
        if self.folder.exists() and any(p.name != "lock" for p in self.folder.iterdir()):
            raise ValueError(f"{self.folder} has files but no run; choose another folder by --out")
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        with replacing(self.config_file) as part:
            part.write_text(to_json(config))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the folder, over all processes; given back even if the process is killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / "lock", timeout=0):
                yield
        except Timeout:
            raise BusyError(f"another process is training in {self.folder}") from None

    def result(self) -> dict[str, Any] | None:
        """The record of a finished run."""
        if not self.result_file.exists():
            return None
        try:
            return json.loads(self.result_file.read_text())
        except ValueError:
            raise ValueError(
                f"{self.result_file} is damaged; remove it and resume to write it again"
            ) from None

    def finish(self, record: dict[str, Any]) -> None:
        """Add the record to the results and mark the run as finished."""
        append_result(self.results_file, record)
        with replacing(self.result_file) as part:
            part.write_text(json.dumps(record, indent=2) + "\n")
        self.forget()

    def forget(self) -> None:
        """Remove the checkpoints of a run that will not go on."""
        for path in self.checkpoints.iterdir():
            path.unlink()

    def steps(self) -> list[int]:
        """The steps that are saved."""
        files = self.checkpoints.glob("step-*.safetensors")
        return sorted(int(path.stem.removeprefix("step-")) for path in files)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08}.safetensors"

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint whole or not at all, then remove all but the newest few."""
        tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        meta = {"state": json.dumps(state), "crc32": str(_crc32(tensors))}
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        with replacing(self.checkpoint(step)) as part:
            save_file(tensors, part, meta)
        for old in self.steps()[:-KEPT]:
            self.checkpoint(old).unlink(missing_ok=True)

    def load(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the state of a checkpoint, checked."""
        path = self.checkpoint(step)
        older = [s for s in self.steps() if s < step]
        advice = f"remove it to go on from step {older[-1]}" if older else "remove it to begin anew"
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state = json.loads(meta["state"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path} is damaged ({reason}); {advice}") from None
        if meta.get("crc32") != str(_crc32(tensors)):
            raise ValueError(f"{path} is damaged (its checksum differs); {advice}")
        return tensors, state

    def log(self, line: dict[str, Any]) -> None:
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        return list(read_lines(self.metrics_file))

    def rewind(self, step: int) -> None:
        """Forget what was logged after a step, and parts of files that a killed process left."""
        for part in self.folder.rglob("*.part"):
            part.unlink()
        kept = [line for line in self.metrics() if line["step"] <= step]
        with replacing(self.metrics_file) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in kept))


class BusyError(ValueError):
    """Another process has the run."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; a last line that was cut short is left out."""
    if not path.exists():
        return
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}: line {number} is damaged; remove it") from None


def append_result(path: Path, record: dict[str, Any]) -> None:
    """Add a line, unless the same run is there; several processes may do so at once."""
    with FileLock(f"{path}.lock"):
        known = list(read_lines(path))
        if any(r["name"] == record["name"] and r["config"] == record["config"] for r in known):
            return
        with replacing(path) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in [*known, record]))


def provenance(device: torch.device) -> dict[str, Any]:
    """What a record was computed on and with."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "cores": os.cpu_count(),
        "versions": {
            "fastrpb": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "revision": _revision(),
    }


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak: of the allocator on CUDA, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _revision() -> str | None:
    """The commit of the source that runs, with "+" where it was changed; None outside a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe"]
    options = ["--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _crc32(tensors: dict[str, Tensor]) -> int:
    code = 0
    for name in sorted(tensors):
        code = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy().data, code)
    return code
