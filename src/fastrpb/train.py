"""Training by `accelerate`: on the CPU, one GPU, or many by `accelerate launch` and `torchrun`.

What a step computes is a function of the config, the weights and the number of the step: the order
of the data, the learning rate and the random numbers all follow from (seed, step). So a checkpoint
holds the weights, the optimiser and where the data stand, and a run that goes on from one computes
what it would have computed uninterrupted, bit for bit on the CPU with as many threads.
"""

import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list
from safetensors import SafetensorError
from torch import Tensor

from fastrpb.checks import check_choice
from fastrpb.config import RunConfig
from fastrpb.data import Batch, Batches, Dataset, Split
from fastrpb.evaluate import Metrics, evaluate, evaluation_batch, trained
from fastrpb.files import is_full, reason_of
from fastrpb.model import save_model
from fastrpb.parts import (
    build,
    clear_errors,
    load_data,
    make_accelerator,
    own_random_numbers,
    under,
)
from fastrpb.presets import name_of
from fastrpb.processes import caught_signals
from fastrpb.progress import Progress, State, Window
from fastrpb.provenance import peak_memory, provenance
from fastrpb.records import read_lines
from fastrpb.run import Run
from fastrpb.step import Stepper

_T = TypeVar("_T")
TRACKERS = ("tensorboard", "wandb")
_LENGTHS = 64  # compiled batches have a multiple of so many tokens: few shapes to record
_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # of the GPU, which several processes then share
_REPORT_EVERY = 10  # steps; the loss is read only then, so that a GPU need not wait at each step


class Interruption(Exception):  # noqa: N818, nothing went wrong
    """A signal ended the training; its state is saved."""

    def __init__(self, step: int, steps: int, number: int):
        super().__init__(f"stopped at step {step} of {steps}, and saved")
        self.number = number


class DivergedError(ValueError):
    """The loss is no number any more."""


def train(
    config: RunConfig,
    folder: str | Path,
    *,
    data_dir: str | Path | None = None,
    trackers: Sequence[str] = (),
    cpu: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_validation: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> dict[str, Any]:
    """Train a config in a folder and return its record; a run that was interrupted there continues.

    Args:
        config: of the run; a folder that was started with another one is refused.
        folder: of the run, see `fastrpb.run`. The record is added to results.jsonl beside it.
        data_dir: as in `fastrpb.data.load`.
        trackers: of "tensorboard" and "wandb", what else to write to.
        cpu: train on the CPU even where there is a GPU.
        on_progress: called after every tenth step.
        on_validation: called after every validation with the step, in every process; what it
            raises ends the run.

    Raises:
        Interruption: after SIGINT or SIGTERM, with the state saved.
        ValueError: with one sentence, for anything that the user can mend.

    >>> from tempfile import TemporaryDirectory
    >>> from fastrpb.config import override
    >>> from fastrpb.presets import preset
    >>> config = override(preset("digits"), {"steps": 2, "layers": 1})
    >>> with TemporaryDirectory() as folder:
    ...     record = train(config, f"{folder}/run", cpu=True)
    >>> sorted(record["metrics"]["test"])
    ['accuracy', 'f1', 'loss']
    """
    if not isinstance(config, RunConfig):
        raise TypeError(f"config must be a RunConfig, as of fastrpb.presets.preset, got {config!r}")
    config.check_bias_is_read()
    run = Run(folder)
    data = load_data(config, data_dir)  # first, so that a missing file leaves no folder
    _check_trackers(trackers)
    accelerator = make_accelerator(
        config,
        cpu,
        log_with=list(trackers) or None,
        project_config=ProjectConfiguration(logging_dir=str(run.folder / "tensorboard")),
    )
    with clear_errors(config, accelerator), own_random_numbers(accelerator.device):
        # Made before the folder, so that a config that cannot be leaves none.
        trainer = _Trainer(config, run, accelerator, data, on_progress, on_validation)
        with ExitStack() as held:
            _first_alone(accelerator, run.refuse_others)  # before it leaves a lock there
            _first_alone(accelerator, lambda: held.enter_context(run.locked()))
            held.enter_context(_ended(accelerator))
            finished = _first_alone(accelerator, lambda: _begin(run, config, trainer.digest))
            if finished is not None:
                return finished
            with caught_signals() as trainer.signals:
                return trainer.fit()


@contextmanager
def _ended(accelerator: Accelerator) -> Iterator[None]:
    """Ends the trackers; where they cannot end, that does not hide what went wrong before."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            accelerator.end_training()
        raise
    accelerator.end_training()


def _first_alone(accelerator: Accelerator, function: Callable[[], _T]) -> _T:
    """What the first process does, for all of them: what it gives, or why it cannot."""
    given, error = None, None
    if accelerator.is_main_process:
        try:
            given = function()
        except (OSError, ValueError) as reason:
            error = reason
    given, error = broadcast_object_list([given, error])
    if error is not None:
        raise error
    return given


def _begin(run: Run, config: RunConfig, digest: str) -> dict[str, Any] | None:
    """Open the folder; the record of a finished run."""
    run.open(config)
    for _ in read_lines(run.results_file):  # a damaged one should be told now, not at the end
        pass
    finished = run.result() if run.model_file.exists() else None
    if finished is not None:
        run.check(finished["config"], config)
        run.check_data(finished.get("data"), digest)
        trained(run, config)  # there, and whole
        run.finish(finished)
    return finished


class _Trainer:
    """The parts of a run, and how far it is."""

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        accelerator: Accelerator,
        data: Dataset,
        on_progress: Callable[[Progress], None],
        on_validation: Callable[[int, Metrics], None],
    ):
        self.config, self.run, self.accelerator = config, run, accelerator
        self.on_progress, self.on_validation = on_progress, on_validation
        self.signals: list[int] = []
        self.data, self.digest = data, data.digest()
        self.provenance = provenance(accelerator.device)  # now: the source may change meanwhile
        self.batches = self._train_batches()
        self.steps = config.steps or (config.epochs or 0) * len(self.batches)
        self.eval_every = config.eval_every or len(self.batches)
        self.stepper = Stepper(config, accelerator, data.train)
        self.state_dicts = self.stepper.state_dicts
        self.state = self.began = State()
        self.best: dict[str, Tensor] = {}  # weights of the best validation, where they are kept
        self.saved: int | None = None
        self.slow = True  # steps of a second or more; who knows, at first
        self.window = Window()

    def fit(self) -> dict[str, Any]:
        self._restore()
        self.began = replace(self.state)
        if self.accelerator.is_main_process:
            with self._writing():
                self.run.rewind(self.state.step, self.state.validated)
        if self.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        # A validation at the saved step comes again, and is then there twice.
        purge = {"tensorboard": {"purge_step": self.state.step + 1}}
        try:
            self.accelerator.init_trackers("fastrpb", init_kwargs=purge)
        except BaseException:
            self.accelerator.trackers = []  # to end one that has not begun would hide why
            raise
        with self.stepper.ready():
            return self._run()

    def _run(self) -> dict[str, Any]:
        stream = itertools.chain.from_iterable(itertools.repeat(self.batches))
        try:
            while True:
                if self._due(self.config.save_every):
                    self._save()  # first: an evaluation may fail
                if not self.state.step:
                    self._try_evaluation()
                if self._due(self.eval_every) and self.state.validated < self.state.step:
                    self._validate()
                if self.state.step == self.steps:
                    return self._finish()
                self._train_step(stream)
                if self._due(_REPORT_EVERY):
                    self._report()
                if self._alone or self.slow or self._due(_REPORT_EVERY):
                    self._stop_if_asked()
        except _Stop as stop:
            with suppress(_Stop):  # if that cannot be shown either
                self._report()
            self._save()
            raise Interruption(self.state.step, self.steps, stop.number) from None
        except RuntimeError:
            # A compiler is a process of its own, and a terminal's Ctrl-C ends it too.
            if not self.signals:
                raise
            raise Interruption(self.saved or 0, self.steps, self.signals[0]) from None

    def _due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.steps

    def _train_batches(self) -> Batches:
        config, processes = self.config, self.accelerator.num_processes
        config.check_parts(processes)
        return Batches(
            self.data.train,
            config.batch_size,
            pad_id=self.data.task.pad_id,
            seed=config.seed,
            drop_last=True,
            multiple=_LENGTHS if config.compile else 1,
            rank=self.accelerator.process_index,
            world_size=processes,
        )

    def _train_step(self, stream: Iterator[Batch]) -> None:
        state, window = self.state, self.window
        window.begin()
        batch = next(stream)
        rate = self.config.learning_rate_at(state.step + 1, self.steps)
        window.add(state.step, self.stepper.take(state.step, batch, rate))
        window.tokens += int(batch.mask.sum())
        state.step += 1

    def _report(self) -> None:
        """Read the loss of the last steps, check it, show and log it."""
        if not self.window.means:
            return
        state, window = self.state, self.window
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()  # the CPU runs ahead of steps however slow
        others = torch.tensor([float(window.tokens), time.perf_counter() - window.start])
        rows = torch.stack([*window.means.values(), others.to(self.accelerator.device)])
        rows: Any = self.accelerator.reduce(rows, reduction="sum")
        *rows, (tokens, waited) = rows.tolist()
        rows = torch.tensor(rows) / self.accelerator.num_processes
        self.slow = waited > len(rows) * self.accelerator.num_processes
        seconds = time.perf_counter() - window.start
        for step, (loss, _) in zip(window.means, rows.tolist(), strict=True):
            if not math.isfinite(loss):
                self._diverged(f"the loss is {loss} at step {step + 1}")
        loss, accuracy = rows.mean(0).tolist()
        state.seconds += seconds
        state.tokens += round(tokens)
        self.window = Window()
        speed = tokens / seconds
        # By this process's own speed: what went before may have run on another machine.
        here = (state.seconds - self.began.seconds) / (state.step - self.began.step)
        left = here * (self.steps - state.step)
        rate = self.config.learning_rate_at(state.step, self.steps)
        self._log({"loss": loss, "accuracy": accuracy, "learning_rate": rate, "tokens/s": speed})
        if self.accelerator.is_main_process:
            self._show(Progress(state.step, self.steps, loss, accuracy, speed, left))

    def _show(self, progress: Progress) -> None:
        """If nobody can look any more, for a closed pipe or a full disk, there is work to save."""
        try:
            self.on_progress(progress)
        except (OSError, SystemExit):  # rich makes the second of a closed pipe
            if self._alone:
                raise _Stop(signal.SIGPIPE) from None
            raise

    def _diverged(self, what: str) -> NoReturn:
        what += f"; the state of step {self.saved} is saved in {self.run.folder}"
        share = os.environ.get(_SHARE)
        if share is not None and self.accelerator.device.type == "cuda":  # no rate mends this
            raise ValueError(
                f"{what}; with {_SHARE}={share} products of finite numbers have been NaN on a GPU: "
                "resume without it"
            )
        raise DivergedError(
            f"{what}; try a lower learning rate than {self.config.learning_rate:g}, a longer "
            "warm-up, or clip=1"
        )

    def _validate(self) -> None:
        self._report()
        metrics = self._evaluate(self.data.validation)
        state = self.state
        state.validated = state.step
        better = metrics.accuracy > state.validation.get("accuracy", -1.0)
        if better or self.config.keep == "last":
            state.kept, state.validation = state.step, metrics._asdict()
            if self.config.keep == "best":
                self.best = {name: x.clone() for name, x in self.state_dicts.weights().items()}
        self._log({"validation": metrics._asdict()})
        self.on_validation(state.step, metrics)

    def _try_evaluation(self) -> None:
        """Of one batch: for want of memory, say, it should fail now, not after the last step."""
        split = max(self.data.validation, self.data.test, key=len)
        size = min(evaluation_batch(self.config, self.accelerator.num_processes), len(split))
        self._evaluate(split.take(torch.arange(size)))

    def _evaluate(self, split: Split) -> Metrics:
        # To compile for batches of evaluation too, and for the last, takes longer than it saves.
        with torch.compiler.set_stance("force_eager"):
            metrics = evaluate(
                self.stepper.model, split, self.config, self.accelerator, self._stop_if_asked
            )
        if not math.isfinite(metrics.loss):
            self._diverged(f"the loss of an evaluation is {metrics.loss} at step {self.state.step}")
        return metrics

    def _log(self, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with self._writing():
                self.run.log({"step": self.state.step, **values})
        numbers = values.get("validation")
        kind = "train" if numbers is None else "validation"
        named = {f"{kind}/{name}": x for name, x in (numbers or values).items()}
        with self._writing():
            self.accelerator.log(named, step=self.state.step)

    @property
    def _alone(self) -> bool:
        return self.accelerator.num_processes == 1

    def _stop_if_asked(self) -> None:
        """Several processes must agree, soon enough for their launcher, which waits for 30 s."""
        asked = bool(self.signals)
        if not self._alone:
            here = torch.tensor(float(asked), device=self.accelerator.device)
            asked = cast(Tensor, self.accelerator.reduce(here, reduction="sum")).item() > 0
        if asked:
            raise _Stop(self.signals[0] if self.signals else signal.SIGTERM)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk or the like is one sentence that says what is safe."""
        try:
            yield
        except (OSError, SafetensorError, ValueError) as error:
            if not self.run.exists():
                raise ValueError(
                    f"{self.run.folder} is gone, with what was saved in it; if it was moved, "
                    "resume it there"
                ) from error
            state = "nothing is saved" if self.saved is None else f"step {self.saved} is safe"
            if isinstance(error, ValueError):  # it says what to mend
                raise ValueError(f"{error}, then resume; {state}") from None
            reason = " ".join(reason_of(error).split())
            if getattr(error, "filename", None) is None:
                reason = f"{self.run.folder}: {reason}"
            mend = "free some space and " if is_full(error) else ""
            raise ValueError(f"cannot write to {reason}; {state}; {mend}resume") from error

    def _save(self) -> None:
        self._report()
        if self.saved == self.state.step:
            return
        tensors = {f"model.{name}": x for name, x in self.state_dicts.weights().items()}
        if not all(x.isfinite().all() for x in tensors.values()):
            self._diverged(f"a weight is not finite after step {self.state.step}")
        tensors |= {f"best.{name}": x for name, x in self.best.items()}
        tensors |= {f"optimizer.{name}": x for name, x in self.state_dicts.moments().items()}
        self.state.memory = max(self.state.memory, peak_memory(self.accelerator.device))
        state = {**asdict(self.state), "data": self.batches.state_dict()}
        state |= {"config": asdict(self.config), "digest": self.digest}
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler.state_dict()
        if self.accelerator.is_main_process:
            with self._writing():
                self.run.save(self.state.step, tensors, state)
        self.saved = self.state.step

    def _restore(self) -> None:
        """Go to the newest checkpoint, if there is one; the first process reads it for all."""
        tensors: dict[str, Tensor] = {}

        def read() -> tuple[dict[str, Any], bool] | None:
            steps = self.run.steps()
            if not steps:
                return None
            saved, state = self.run.load(steps[-1])
            self.run.check(state.pop("config"), self.config)
            self.run.check_data(state.pop("digest", None), self.digest)
            tensors.update(saved)
            return state, bool(under("optimizer.", saved))

        found = _first_alone(self.accelerator, read)
        if found is None:
            return
        state, has_moments = found  # none before the first step that a scaler did not skip
        self.batches.load_state_dict(state.pop("data"))
        scaler = state.pop("scaler", None)
        if scaler is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(scaler)
        self.state = State(**state)
        self.saved = self.state.step
        self.state_dicts.set_weights(under("model.", tensors))
        self.best = under("best.", tensors)
        if has_moments:
            self.state_dicts.set_moments(under("optimizer.", tensors))

    def _finish(self) -> dict[str, Any]:
        state = self.state
        if self.config.keep == "best":
            self.state_dicts.set_weights(self.best)
        test = self._evaluate(self.data.test)
        weights = self.state_dicts.weights()
        memory = max(state.memory, peak_memory(self.accelerator.device))
        record = {
            "name": name_of(self.config),
            "config": asdict(self.config),
            "data": self.digest,
            "metrics": {"validation": state.validation, "test": test._asdict()},
            "steps": self.steps,
            "weights_of_step": state.kept,
            "parameters": self.stepper.parameters,
            "seconds": state.seconds,
            "tokens_per_second": state.tokens / state.seconds,
            "peak_memory_bytes": memory,
            "processes": self.accelerator.num_processes,
            **self.provenance,
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        if self.accelerator.is_main_process:
            model = build(self.config)
            model.load_state_dict(weights)
            with self._writing():
                save_model(model, self.run.model_file)
                self.run.finish(record)
        return record


class _Stop(Exception):  # noqa: N818
    def __init__(self, number: int):
        self.number = number


def _check_trackers(names: Sequence[str]) -> None:
    for name in names:
        check_choice("tracker", name, TRACKERS)
        if find_spec(name) is None:
            raise ValueError(f"tracker={name!r} needs the package {name}: pip install {name}")
