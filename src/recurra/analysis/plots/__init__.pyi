from recurra.analysis.plots.curves import measured_panels, metric_curves
from recurra.analysis.plots.figure import save, save_png
from recurra.analysis.plots.gates import gate_magnitudes, gate_phases, magnitude_activations
from recurra.analysis.plots.gradient_flow import gradient_over_distance
from recurra.analysis.plots.scores import (
    CostPoint,
    accuracy_over_span,
    confusion_matrix,
    contact_sheet,
    perplexity_over_flops,
)

__all__ = [
    "CostPoint",
    "accuracy_over_span",
    "confusion_matrix",
    "contact_sheet",
    "gate_magnitudes",
    "gate_phases",
    "gradient_over_distance",
    "magnitude_activations",
    "measured_panels",
    "metric_curves",
    "perplexity_over_flops",
    "save",
    "save_png",
]
