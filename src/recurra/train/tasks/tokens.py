"""What all tasks over tokens share: their scores, and the temperature that calibrates them."""

from collections.abc import Callable
from typing import Any

from recurra.models.registry import DataSizes
from recurra.train.evaluate import best_temperature, evaluate
from recurra.train.task import Task


class TokenTask(Task):
    """A task whose data are tokens and targets."""

    def sizes(self, data: Any, opened: Any) -> DataSizes:
        """Return the numbers of tokens and of targets."""
        return DataSizes(opened.vocab_size, opened.output_size)

    def score(
        self, run: Any, split: str, temperature: float | None, observe: Callable[..., None] | None = None
    ) -> dict[str, Any]:
        """Score a run on a split; `observe` sees every batch with its predictions."""
        divisor = 1.0 if temperature is None else temperature
        return evaluate(run.model, run.data.source(split), temperature=divisor, observe=observe)._asdict()

    def best_temperature(self, run: Any) -> float:
        """Find the temperature with the lowest validation loss."""
        return best_temperature(run.model, run.data.source("valid"))
