"""Small trained models that come with Recurra: no download, no training.

`memory_horizon()` opens the one there is. Its card, memory-horizon.md beside this file, says how it was trained and
what it reaches.
"""

from recurra.pretrained.horizon import HorizonModel, memory_horizon

__all__ = ["HorizonModel", "memory_horizon"]
