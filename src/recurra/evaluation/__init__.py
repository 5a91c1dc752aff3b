"""Evaluation: losses, perplexity, and accuracy overall, by memory span and by class."""

from recurra.evaluation.accuracy import AroundResets, SpanAccuracy, accuracy_by_span, scaled_accuracy
from recurra.evaluation.classification import (
    ClassScores,
    VideoProbabilities,
    class_scores,
    classify_videos,
)
from recurra.evaluation.evaluate import EvaluationResult, best_temperature, evaluate, evaluate_by_span
from recurra.evaluation.perplexity import bits_per_token, perplexity
from recurra.evaluation.video_stream import SegmentPrediction, classify_stream

__all__ = [
    "AroundResets",
    "ClassScores",
    "EvaluationResult",
    "SegmentPrediction",
    "SpanAccuracy",
    "VideoProbabilities",
    "accuracy_by_span",
    "best_temperature",
    "bits_per_token",
    "class_scores",
    "classify_stream",
    "classify_videos",
    "evaluate",
    "evaluate_by_span",
    "perplexity",
    "scaled_accuracy",
]
