"""How far a run is: what a checkpoint holds of it, what is measured, what is shown."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Progress(NamedTuple):
    """How a run stands; loss, accuracy and speed over the last steps."""

    step: int
    steps: int
    loss: float
    accuracy: float
    tokens_per_second: float
    seconds_left: float


@dataclass
class State:
    """How far a run is, as a checkpoint holds it beside the tensors."""

    step: int = 0
    validated: int = 0  # the step of the last validation
    kept: int = 0  # the step whose weights are kept
    validation: dict[str, float] = field(default_factory=dict)  # of these
    seconds: float = 0.0  # of training, without validation and saving
    tokens: int = 0
    memory: int = 0


class Window:
    """Loss and accuracy of the steps since the last report, still on the device."""

    def __init__(self) -> None:
        self.means: dict[int, Tensor] = {}
        self.tokens = 0
        self.start = 0.0

    def begin(self) -> None:
        if not self.means:
            self.start = time.perf_counter()

    def add(self, step: int, values: Tensor) -> None:
        self.means[step] = values
