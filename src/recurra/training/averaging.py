"""The average of a model's weights over its updates: a mean (averaged SGD, AWD-LSTM) or an exponential moving average.

Evaluation uses the average; training continues from the weights themselves.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from recurra.training.config import AveragingConfig


class WeightAverage:
    """Keeps the average of a model's weights. Before averaging begins, the average is the model itself.

    Args:
        model: the model in training.
        config: when averaging begins, and how fast old weights fade.
        shard: lays a copy of the model out over the ranks, as the model itself is about to be. A model that has been
            laid out cannot be copied, so the copy is then made here.
    """

    def __init__(
        self, model: nn.Module, config: AveragingConfig, *, shard: Callable[[nn.Module], nn.Module] | None = None
    ) -> None:
        self.config = config
        self._model = model
        self._average: AveragedModel | None = None
        self._prepared: AveragedModel | None = None
        if shard is not None and config.start_step is not None:
            self._prepared = self._copy()
            shard(self._prepared.module)

    @property
    def model(self) -> nn.Module:
        """The model with the averaged weights, or the model in training if averaging has not begun."""
        return self._model if self._average is None else self._average.module

    def update(self, step: int) -> None:
        """Add the weights after update number `step`, counted from 1, to the average."""
        if self.config.start_step is None or step <= self.config.start_step:
            return
        if self._average is None:
            self._average = self._make()
        # After a forward pass FSDP keeps the outermost module's weights whole, until a backward pass that never comes.
        if (reshard := getattr(self._average.module, "reshard", None)) is not None:
            reshard()
        self._average.update_parameters(self._model)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the average as plain data; None if averaging has not begun."""
        if self._average is None:
            return None
        return {"weights": self._average.module.state_dict(), "n_averaged": int(self._average.n_averaged)}

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Continue from what `state_dict` returned."""
        if saved is None:
            self._average = None
            return
        self._average = self._make()
        self._average.module.load_state_dict(saved["weights"])
        self._average.n_averaged.fill_(saved["n_averaged"])

    def _make(self) -> AveragedModel:
        return self._copy() if self._prepared is None else self._prepared

    def _copy(self) -> AveragedModel:
        decay = self.config.decay
        # Buffers, such as a Neumann-Cayley inverse, belong to the weights of one step: they are copied, not averaged.
        return AveragedModel(self._model, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
