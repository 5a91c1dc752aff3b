from recurra.analysis.cost import MeasuredCost, PublishedCost, measured_cost, model_kind, published_cost
from recurra.analysis.gates import GateRecord, ResetContrast, record_gates, reset_contrast
from recurra.analysis.gradient_flow import GradientFlow, StepGradients, measure_gradient_flow

__all__ = [
    "GateRecord",
    "GradientFlow",
    "MeasuredCost",
    "PublishedCost",
    "ResetContrast",
    "StepGradients",
    "measure_gradient_flow",
    "measured_cost",
    "model_kind",
    "published_cost",
    "record_gates",
    "reset_contrast",
]
