"""Recurra: recurrent sequence models that train in parallel and run as a stream, from the same weights."""

from recurra.gate_loop import gate_loop
from recurra.scan import linear_scan

__all__ = ["gate_loop", "linear_scan"]
__version__ = "0.1.0"
