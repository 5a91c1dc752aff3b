"""Looking into trained models. The figures are in `recurra.analysis.plots`, which alone needs matplotlib."""

from recurra.analysis.gates import (
    GateRecord,
    ResetContrast,
    record_gates,
    reset_contrast,
    transition_magnitudes,
)

__all__ = ["GateRecord", "ResetContrast", "record_gates", "reset_contrast", "transition_magnitudes"]
