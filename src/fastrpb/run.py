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
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor, nn

from fastrpb.config import RunConfig, differences, from_json, load_config, to_json
from fastrpb.files import SHIPPED, read_tensors, replacing, shipped, write_tensors
from fastrpb.model import load_model
from fastrpb.records import append_result, is_point, is_record, json_object, read_lines

KEPT = 2  # checkpoints


class Run:
    """The files of one run in its folder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if self.folder.name in ("", ".."):  # it needs a name, and a folder around it
            self.folder = self.folder.resolve()
        self.config_file = self.folder / "config.json"
        self.model_file = self.folder / "model.safetensors"
        self.result_file = self.folder / "result.json"
        self.metrics_file = self.folder / "metrics.jsonl"
        self.checkpoints = self.folder / "checkpoints"
        self.results_file = self.folder.parent / "results.jsonl"

    def exists(self) -> bool:
        return self.config_file.exists()

    def config(self) -> RunConfig:
        if not self.folder.exists():
            if str(self.folder) in shipped():
                raise self._not_ours()
            known = ", ".join(shipped())
            raise ValueError(
                f"there is no folder {self.folder}; the package has models of: {known}"
            )
        if not self.exists():
            raise ValueError(f"{self.folder} is no run: it has no config.json")
        try:
            return load_config(self.config_file)
        except ValueError as error:
            lost = (
                self.steps() and json_object(self.config_file.read_text(errors="replace")) is None
            )
            advice = f"; remove it and give its options again with --out {self.folder}"
            raise ValueError(f"{error}{advice if lost else ''}") from None

    def open(self, config: RunConfig) -> None:
        """Make the folder, or check that it belongs to the same config."""
        if self.exists():
            self.check(asdict(self.config()), config)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.steps():
            self.check(self.load(self.steps()[-1])[1]["config"], config)
        with replacing(self.config_file) as part:
            part.write_text(to_json(config))

    def refuse_others(self) -> None:
        """Refuse a folder within a run, or of files that are none of a run's."""
        refuse_runs_in(self.folder.parent)
        if self.exists() or self.steps() or not self.folder.exists():
            return
        # A process that was killed as it began leaves no more than a lock and parts of files. Of a
        # run whose config was lost the others remain.
        ours = {"lock", self.checkpoints.name, self.metrics_file.name, "tensorboard"}
        ours |= {path.name for path in self.folder.glob("*.part")}
        if {path.name for path in self.folder.iterdir()} - ours:
            raise ValueError(f"{self.folder} has files but no run; choose another folder by --out")

    def check(self, started: dict[str, Any], config: RunConfig) -> None:
        """Raise unless the run was started with this config."""
        saved = from_json(json.dumps(started), self.folder)
        changed = differences(saved, config)
        if changed:
            raise ValueError(
                f"{self.folder} was started with another config: {'; '.join(changed)}; "
                "resume without these changes, or start another run"
            )

    def check_data(self, started: str | None, digest: str) -> None:
        """Raise unless the run was started on these data; older versions did not record them."""
        if started not in (None, digest):
            raise ValueError(
                f"{self.folder} was started on other data; resume with the original --data-dir, or "
                "start another run"
            )

    def _is_shipped(self) -> bool:
        return SHIPPED in self.folder.resolve().parents

    def _not_ours(self) -> ValueError:
        name = self.folder.name
        return ValueError(f"{name} comes with the package; train your own: --config {name}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the folder, over all processes; given back even if the process is killed."""
        if self._is_shipped():
            raise self._not_ours()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / "lock", timeout=0):
                yield
        except Timeout:
            raise BusyError(f"another process is training in {self.folder}") from None

    def busy(self) -> bool:
        """Whether a process is training here."""
        if not (self.folder / "lock").exists():
            return False
        try:
            with self.locked():
                return False
        except BusyError:
            return True

    def result(self) -> dict[str, Any] | None:
        """The record of a finished run."""
        if not self.result_file.exists():
            return None
        record = json_object(self.result_file.read_text(errors="replace"))
        if record is None or not is_record(record):
            raise ValueError(
                f"{self.result_file} is damaged; its record may be in {self.results_file}; "
                "remove the run to train it again"
            )
        return record

    @property
    def resume_command(self) -> str:
        """What goes on with it, to be pasted into a shell."""
        return shlex.join(["fastrpb", "train", "--resume", str(self.folder)])

    def model(self) -> nn.Module:
        """The trained model."""
        advice = f"remove it and train it again: {self.resume_command}"
        if self._is_shipped():
            advice = "install the package again"
        try:
            return load_model(self.model_file)
        except ValueError as error:
            raise ValueError(f"{error}; {advice}") from None

    def finish(self, record: dict[str, Any]) -> None:
        """Mark the run as finished and add the record to the results; no harm if it was done.

        The results last: a run that has its line there is not looked at again.
        """
        with replacing(self.result_file) as part:
            part.write_text(json.dumps(record, indent=2) + "\n")
        self.forget()
        append_result(self.results_file, record)

    def forget(self) -> None:
        """Remove the checkpoints of a run that will not go on."""
        for path in self.checkpoints.glob("step-*"):
            path.unlink()

    def steps(self) -> list[int]:
        """The steps that are saved."""
        files = self.checkpoints.glob("step-*.safetensors")
        numbers = (path.stem.removeprefix("step-") for path in files)
        return sorted(int(number) for number in numbers if number.isdecimal())

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08}.safetensors"

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint whole or not at all, then remove all but the newest few."""
        self.checkpoints.mkdir(exist_ok=True)
        write_tensors(tensors, self.checkpoint(step), {"state": json.dumps(state)})
        for old in self.steps()[:-KEPT]:
            self.checkpoint(old).unlink(missing_ok=True)

    def load(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the state of a checkpoint, checked."""
        older = [s for s in self.steps() if s < step]
        advice = f"remove it to go on from step {older[-1]}" if older else "remove it to begin anew"
        try:
            tensors, meta = read_tensors(self.checkpoint(step))
            if "state" not in meta:
                raise ValueError(f"{self.checkpoint(step)} holds no state of a run")
            return tensors, json.loads(meta["state"])
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"a damaged checkpoint: {reason}; {advice}") from None

    def log(self, line: dict[str, Any]) -> None:
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The points of the curves; what is none is left out."""
        return [line for line in read_lines(self.metrics_file) if is_point(line)]

    def rewind(self, step: int, validated: int) -> None:
        """Forget what was logged after a step, or of validation after that of another one.

        And parts of files that a killed process left.
        """
        for part in self.folder.rglob("*.part"):
            part.unlink()
        limits = ((x, validated if "validation" in x else step) for x in self.metrics())
        kept = [x for x, last in limits if x["step"] <= last]
        with replacing(self.metrics_file) as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in kept))


class BusyError(ValueError):
    """Another process has the run."""


def refuse_runs_in(folder: Path) -> None:
    """Refuse a run's folder as that of others: whoever looks at the outer one does not see them."""
    run = Run(folder)
    config = json_object(run.config_file.read_text(errors="replace")) if run.exists() else {}
    if config is None or "task" in config:  # damaged, or a run's; others have such files, too
        raise ValueError(f"{folder} is a run itself; choose another folder by --out")
