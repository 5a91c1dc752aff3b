"""Whether a model's weights are still the same as before."""

import copy
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from recurra.checks import sentence

_VERSION = attrgetter("_version")


class WatchedWeights:
    """The parameters, buffers and submodules of a model as they are now, to be compared with later.

    It notices weights that are changed in place or moved to other memory, and whatever is replaced, added or removed.
    Values written in place through `.data` do not count as a change in PyTorch and are not noticed.

    A deep copy of a model together with this object watches the copy, unless the model had changed before.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watch([entries for m in model.modules() for entries in (m._parameters, m._buffers, m._modules)])

    def _watch(self, owners: list[dict[str, Any]]) -> None:
        self._owners = [entries for entries in owners if entries]
        self._empty = [entries for entries in owners if not entries]
        self._values = list(chain.from_iterable(map(dict.values, self._owners)))  # kept, so that no id is used again
        self._ids = list(map(id, self._values))
        tensors = {id(value): value for value in self._values if isinstance(value, Tensor)}.values()
        self._weights = [weight for weight in tensors if not weight.is_inference()]  # which count no changes
        self._places, self._versions = self._now()

    def _now(self) -> tuple[list[int], list[int]]:
        return list(map(Tensor.data_ptr, self._weights)), list(map(_VERSION, self._weights))

    def unchanged(self) -> bool:
        """Whether everything is as it was."""
        # asked at each call of a model: a loop over the modules in Python would take several times as long
        ids = list(map(id, chain.from_iterable(map(dict.values, self._owners))))
        return ids == self._ids and not any(self._empty) and self._now() == (self._places, self._versions)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WatchedWeights":
        twin = copy.copy(self)
        if self.unchanged():
            twin._watch(copy.deepcopy(self._owners + self._empty, memo))  # those of the copied modules, by the memo
        else:
            twin._ids = []
        return twin


def refuse_adapters(model: nn.Module) -> None:
    """Refuse layers with adapters: merging them writes through `.data`, which nothing notices.

    Raises:
        ValueError: naming the first such layer.
    """
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft" or hasattr(module, "active_adapters"):
            came = f"one with an adapter, the {type(module).__name__} {name}"
            raise ValueError(sentence("model", came, "one without", "call merge_and_unload first"))
