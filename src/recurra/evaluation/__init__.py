"""How good a model is: losses, perplexity, accuracy, accuracy by memory span."""

from recurra.evaluation.accuracy import SpanAccuracy, accuracy_by_span
from recurra.evaluation.evaluate import EvaluationResult, evaluate, evaluate_by_span
from recurra.evaluation.perplexity import bits_per_token, perplexity

__all__ = [
    "EvaluationResult",
    "SpanAccuracy",
    "accuracy_by_span",
    "bits_per_token",
    "evaluate",
    "evaluate_by_span",
    "perplexity",
]
