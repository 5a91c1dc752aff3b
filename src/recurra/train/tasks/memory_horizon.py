"""Memory Horizon, the task of the GateLoop paper: accuracy by memory span, and after resets."""

from typing import Any

from recurra.data.memory_horizon import MemoryHorizonConfig, SpanAccuracy, memory_spans
from recurra.train.evaluate import AroundResets, EvaluationResult, evaluate_by_span
from recurra.train.experiment import Experiment
from recurra.train.task import TokenTask, register_task


@register_task("memory-horizon")
class MemoryHorizonTask(TokenTask):
    """Its sequences are generated, so that nothing lies beside a run."""

    data = MemoryHorizonConfig
    has_spans = True

    def explored(self, run: Any) -> dict[str, Any]:
        data = run.experiment.data
        return {
            "kind": "memory-horizon",
            "largest": data.largest_number,
            "reset": data.largest_number + 1,
            "modulus": data.modulus,
        }

    def n_steps(self, experiment: Experiment) -> int:
        length: int = experiment.data.sequence_length
        return length

    def score(self, run: Any, split: str, temperature: float | None, observe: Any = None) -> dict[str, Any]:
        around = AroundResets(run.data.reset_token)
        return super().score(run, split, temperature, around) | around.scores

    def score_by_span(self, run: Any) -> tuple[EvaluationResult, SpanAccuracy]:
        reset_token = run.data.reset_token
        return evaluate_by_span(
            run.model, run.data.source("test"), lambda tokens: memory_spans(tokens, reset_token=reset_token)
        )

    def reset_token(self, run: Any) -> int:
        token: int = run.data.reset_token
        return token
