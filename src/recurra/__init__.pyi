from recurra import state
from recurra.mixers import create_mixer, list_mixers
from recurra.ops.delta_rule import delta_rule
from recurra.ops.gate_loop import gate_loop
from recurra.ops.scan import linear_scan
from recurra.train.run import open_run

__version__: str
__all__ = ["create_mixer", "delta_rule", "gate_loop", "linear_scan", "list_mixers", "open_run", "state"]
