"""Recurra: recurrent sequence models that train in parallel and run as a stream, from the same weights."""

from recurra import scan, state
from recurra.gateloop import gate_loop
from recurra.mixers import create_mixer, list_mixers
from recurra.scan import linear_scan

__all__ = ["create_mixer", "gate_loop", "linear_scan", "list_mixers", "scan", "state"]
__version__ = "0.1.0"
