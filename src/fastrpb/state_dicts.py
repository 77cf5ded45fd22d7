"""The weights and the optimiser's moments of a training, whole, whatever processes share them."""

from collections.abc import Sequence
from typing import Any, cast

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

# Gathered from all processes, on the CPU of the first; empty on the others.
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class StateDicts:
    """Reads and sets the tensors of a prepared model and its optimiser.

    Every process calls; the first one alone gets tensors, and its tensors are set.

    Args:
        model: as `accelerate` has prepared it.
        optimizer: the same.
        groups: names of the parameters, by the groups of the optimiser.
        processes: that train together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        groups: Sequence[Sequence[str]],
        processes: int,
    ):
        self._model, self._optimizer, self._groups = model, optimizer.optimizer, groups
        self._from_first = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=processes > 1
        )

    def weights(self) -> dict[str, Tensor]:
        return cast(Any, get_model_state_dict(self._model, options=_WHOLE))

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        set_model_state_dict(self._model, cast(Any, weights), options=self._from_first)

    def moments(self) -> dict[str, Tensor]:
        """Of every parameter, as "moment.parameter"."""
        if not self._optimizer.state:  # where it is empty, torch would make one a step too old
            return {}
        whole: Any = get_optimizer_state_dict(self._model, self._optimizer, options=_WHOLE)
        return {
            f"{moment}.{name}": x
            for name, values in whole.get("state", {}).items()
            for moment, x in values.items()
        }

    def set_moments(self, tensors: dict[str, Tensor]) -> None:
        """What `moments` gave after a step or more; nothing in processes but the first."""
        state: dict[str, dict[str, Tensor]] = {}
        for key, x in tensors.items():
            moment, name = key.split(".", 1)
            state.setdefault(name, {})[moment] = x
        groups = [
            {**group, "params": names}
            for group, names in zip(self._optimizer.param_groups, self._groups, strict=True)
        ]
        whole: Any = {"state": state, "param_groups": groups} if state else {}
        set_optimizer_state_dict(self._model, self._optimizer, whole, options=self._from_first)
