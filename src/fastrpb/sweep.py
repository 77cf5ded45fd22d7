"""The paper's search of the learning rate: Bayesian, over trials that many machines can share."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

import optuna
from filelock import FileLock, Timeout
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from fastrpb.config import RunConfig, differences, from_json, to_json
from fastrpb.evaluate import Metrics
from fastrpb.files import replacing
from fastrpb.parts import load_data
from fastrpb.progress import Progress
from fastrpb.records import json_object
from fastrpb.run import Run, refuse_runs_in
from fastrpb.train import DivergedError, train

_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_JUST_BEGUN = timedelta(minutes=1)
_LOOK_AGAIN = 1.0  # seconds between looks at the trials of other workers


def sweep(
    config: RunConfig,
    folder: str | Path,
    *,
    trials: int = 20,
    low: float | None = None,
    high: float | None = None,
    data_dir: str | Path | None = None,
    cpu: bool = False,
    on_progress: Callable[[str, Progress], None] = lambda name, progress: None,
    on_trial: Callable[[str, str], None] = lambda name, words: None,
) -> RunConfig:
    """The config with the learning rate of the best validation, found by Optuna's TPE.

    The journal of the study is a file in the folder: workers that share the folder share the
    study, and a stopped one goes on, its unfinished trials from their checkpoints. Workers with no
    trial left wait for the others, and take over what these do not finish. A trial whose
    validation stays under the median of the others at the same step is cut short.

    Args:
        config: of every trial, but for its learning rate. Validation never uses the test split.
        folder: of the study; it gets best.json, which `fastrpb train --config` takes.
        trials: of the study, those of all workers and of earlier calls counted in.
        low, high: the range of the rate; default: a tenth to ten times that of the config.
        data_dir, cpu: as in `fastrpb.train.train`.
        on_progress: called with the name of a trial and how it stands.
        on_trial: called with the name of a trial and what came of it.
    """
    wanted, config = config, replace(config, validation="train")
    low = config.learning_rate / 10 if low is None else low
    high = config.learning_rate * 10 if high is None else high
    if trials < 1:
        raise ValueError(f"trials={trials} must be at least 1")
    if not 0 < low < high < math.inf:
        raise ValueError(f"low={low:g} and high={high:g} must be positive, the first less")
    data = load_data(config, data_dir)  # first, so that a missing file leaves no study
    folder, worker = Path(folder), uuid4().hex
    study = _open(config, folder, data.digest(), (low, high))

    def objective(trial: optuna.Trial) -> float:
        rate = trial.params["learning_rate"]
        run = _run(folder, rate)

        def judge(step: int, metrics: Metrics) -> None:
            trial.report(metrics.accuracy, step)
            if trial.should_prune():
                raise optuna.TrialPruned

        try:
            record = train(
                replace(config, learning_rate=rate),
                run.folder,
                data_dir=data_dir,
                cpu=cpu,
                on_progress=partial(on_progress, run.folder.name),
                on_validation=judge,
            )
        except (optuna.TrialPruned, DivergedError):
            run.forget()
            raise optuna.TrialPruned from None
        return record["metrics"]["validation"]["accuracy"]

    def next_trial() -> optuna.Trial | None:
        """None while other workers have all that are left."""
        with FileLock(folder / "study.lock"):
            _queue_again(study, folder)
            if len(study.get_trials(states=(*_FINISHED, TrialState.RUNNING))) >= trials:
                return None
            trial = study.ask()
            # Before its rate: a trial with a rate has a worker.
            trial.set_user_attr("worker", worker)
            trial.suggest_float("learning_rate", low, high, log=True)
            return trial

    with _alive(folder, worker):
        while len(study.get_trials(states=_FINISHED)) < trials:
            trial = next_trial()
            if trial is None:
                time.sleep(_LOOK_AGAIN)
            else:
                told = _tell(study, trial, objective)
                pruned = told.state == TrialState.PRUNED
                words = "cut short" if pruned else f"validation accuracy {told.value:.2%}"
                on_trial(_run(folder, told.params["learning_rate"]).folder.name, words)
    return _best(study, wanted, folder)


def _tell(
    study: optuna.Study, trial: optuna.Trial, objective: Callable[[optuna.Trial], float]
) -> FrozenTrial:
    """What came of a trial; one that is cut off has failed, and comes again."""
    try:
        value = objective(trial)
    except optuna.TrialPruned:
        return study.tell(trial, state=TrialState.PRUNED)
    except BaseException:
        with suppress(OSError):  # a full disk; that of a worker that has ended comes again, too
            study.tell(trial, state=TrialState.FAIL)
        raise
    return study.tell(trial, value)


@contextmanager
def _alive(folder: Path, worker: str) -> Iterator[None]:
    """Held while a worker lives, however it ends; Timeout where another process holds it."""
    with FileLock(folder / f"worker-{worker}.lock", timeout=0) as lock:
        try:
            yield
        finally:
            Path(lock.lock_file).unlink(missing_ok=True)


def _run(folder: Path, rate: float) -> Run:
    """The run of a rate, named by it: a trial that is taken up again finds its checkpoints."""
    return Run(folder / f"rate-{rate!r}")


def _open(config: RunConfig, folder: Path, digest: str, rates: tuple[float, float]) -> optuna.Study:
    """The study of the folder, which must search the same."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    refuse_runs_in(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "study.lock"):
        # Whole, since a lock that a killed worker left is a link to it.
        journal = str((folder / "study.journal").resolve())
        _mend(journal)
        study = optuna.create_study(
            study_name="learning_rate",
            storage=JournalStorage(JournalFileBackend(journal)),
            direction="maximize",
            sampler=optuna.samplers.TPESampler(constant_liar=True),  # for parallel workers
            load_if_exists=True,
        )
        saved, data = (study.user_attrs.get(name) for name in ("config", "data"))
        if saved is None:
            study.set_user_attr("config", to_json(config))
        else:
            changed = differences(from_json(saved, folder), config)
            if changed:
                raise ValueError(
                    f"the study in {folder} searches another config: {'; '.join(changed)}; "
                    "choose another folder by --out"
                )
        if data is None:  # new, or of an older version
            study.set_user_attr("data", digest)
        elif data != digest:
            raise ValueError(
                f"the study in {folder} searches on other data; use the original --data-dir, or "
                "choose another folder by --out"
            )
        low, high = study.user_attrs.get("rates", rates)
        if (low, high) != rates:
            raise ValueError(
                f"the study in {folder} searches rates from {low:g} to {high:g}, not from "
                f"{rates[0]:g} to {rates[1]:g}; choose another folder by --out"
            )
        if "rates" not in study.user_attrs:
            study.set_user_attr("rates", rates)
    return study


def _mend(journal: str) -> None:
    """Cut off a last line that a full disk or a killed worker left unfinished."""
    lock = JournalFileSymlinkLock(journal)
    lock.acquire()
    try:
        content = Path(journal).read_bytes() if Path(journal).exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(journal, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            if json_object(line) is None:
                raise ValueError(
                    f"{journal}: line {number} is damaged; remove it, or choose another folder by "
                    "--out"
                )
    finally:
        lock.release()


def _queue_again(study: optuna.Study, folder: Path) -> None:
    """A rate that was tried but neither finished, nor waits, nor is at a living worker's."""
    cut_off, others = [], set()
    for trial in study.get_trials(deepcopy=False):
        rate = (trial.params or trial.system_attrs.get("fixed_params", {})).get("learning_rate")
        dead = trial.state == TrialState.RUNNING and _is_dead(trial, folder)
        if dead:
            study.tell(trial.number, state=TrialState.FAIL)
        if dead or trial.state == TrialState.FAIL:
            cut_off.append(rate)
        else:
            others.add(rate)
    for rate in dict.fromkeys(cut_off):
        if rate is not None and rate not in others:
            study.enqueue_trial({"learning_rate": rate})


def _is_dead(trial: FrozenTrial, folder: Path) -> bool:
    if "worker" not in trial.user_attrs:  # just begun, or killed just then
        began = trial.datetime_start or datetime.min
        return datetime.now() - began > _JUST_BEGUN
    try:
        with _alive(folder, trial.user_attrs["worker"]):
            return True
    except Timeout:
        return False


def _best(study: optuna.Study, config: RunConfig, folder: Path) -> RunConfig:
    if not study.get_trials(states=[TrialState.COMPLETE]):
        raise ValueError(
            f"no trial in {folder} came to its end: the loss diverged at every learning rate; "
            "choose lower ones by --low and --high"
        )
    best = replace(config, learning_rate=study.best_params["learning_rate"])
    with FileLock(folder / "study.lock"), replacing(folder / "best.json") as part:
        part.write_text(to_json(best))
    return best
