"""Steps of training: the gradients of a batch, and AdamW's change of the weights by them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fastrpb.bias_base import Bias
from fastrpb.config import RunConfig
from fastrpb.data import Batch, Split
from fastrpb.parts import build, classify, seed_from, to_device
from fastrpb.replay import Replayed, own_stream
from fastrpb.state_dicts import StateDicts

_FEW = 0.01  # of the sequences padded: most compiled batches then do without masks


class Stepper:
    """A new model of a config and its optimiser, prepared for training.

    Args:
        config: of the run.
        accelerator: of this process.
        train: the split that is trained on; whether it is padded decides what is compiled.

    Attributes:
        model, state_dicts: as `accelerate` has prepared it, and its weights and moments.
        parameters: how many weights there are.
    """

    def __init__(self, config: RunConfig, accelerator: Accelerator, train: Split):
        self.config, self.accelerator = config, accelerator
        self._masked = config.compile and train.padded > _FEW  # for one program, not two
        seed_from("weights", config.seed)
        model = build(config)
        self.parameters = sum(p.numel() for p in model.parameters())
        if config.compile:
            _compile(model, config)
        groups = _groups(model)
        optimizer = _optimizer(model, groups, config, accelerator.device)
        self.model, self._optimizer = accelerator.prepare(model, optimizer)
        processes = accelerator.num_processes
        self.state_dicts = StateDicts(self.model, self._optimizer, groups, processes)
        # Not where processes exchange gradients during a pass, or blocks are computed again.
        usual = processes == 1 and not config.model.checkpoint
        self._replays = config.compile and usual and accelerator.device.type == "cuda"
        self._gradients = self._add_gradients

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Steps are taken within: on a stream of their own where a GPU replays them."""
        if not self._replays:
            yield
            return
        with own_stream(self.accelerator.device):
            self._gradients = Replayed(self._add_gradients)
            yield

    def take(self, before: int, batch: Batch, rate: float) -> Tensor:
        """One step, with `before` others before it; its mean loss and its accuracy, (2,)."""
        config = self.config
        seed_from("step", config.seed, before, self.accelerator.process_index)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        chunks = (x.chunk(config.accumulate) for x in batch)
        parts = [Batch(*part) for part in zip(*chunks, strict=True)]
        sums = torch.zeros(2, device=self.accelerator.device)
        for part in parts:
            # The processes share their gradients once, after the last part.
            last = part is parts[-1]
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                sums += self._gradients(*to_device(part, self.accelerator.device, self._masked))
        if config.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), config.clip)
        self._optimizer.step()
        # A recording knows where they are.
        self._optimizer.zero_grad(set_to_none=not self._replays)
        return sums / len(batch.labels)

    def _add_gradients(self, labels: Tensor, *inputs: Tensor) -> Tensor:
        """Those of a part of a batch; the sums of its losses and of its hits."""
        logits = classify(self.model, *inputs)
        loss = cross_entropy(logits, labels, reduction="sum")
        self.accelerator.backward(loss / (len(labels) * self.config.accumulate))
        return torch.stack([loss.detach(), (logits.argmax(-1) == labels).sum()])


def _compile(model: Any, config: RunConfig) -> None:
    """Images have one shape. Other lengths vary: one block serves all of them, and every layer."""
    if config.model.image:
        model.compile()
        return
    for block in model.encoder.blocks:
        block.compile(dynamic=True)


def _groups(model: nn.Module) -> list[list[str]]:
    """Names of the parameters: w of the biases last, in a group of its own if there are any."""
    own = {f"{name}.w" for name, part in model.named_modules() if isinstance(part, Bias)}
    rest = [name for name, _ in model.named_parameters() if name not in own]
    return [rest, sorted(own)] if own else [rest]


def _optimizer(
    model: nn.Module, groups: Sequence[Sequence[str]], config: RunConfig, device: torch.device
) -> torch.optim.AdamW:
    named = dict(model.named_parameters())
    decay = config.weight_decay if config.bias_decay is None else config.bias_decay
    settings = (
        {"weight_decay": config.weight_decay, "factor": 1.0},
        {"weight_decay": decay, "factor": config.bias_rate},
    )
    return torch.optim.AdamW(
        [
            {"params": [named[name] for name in names], **of_group}
            for names, of_group in zip(groups, settings, strict=False)
        ],
        betas=(0.9, config.beta2),
        eps=config.eps,
        fused=device.type in ("cpu", "cuda"),
    )
