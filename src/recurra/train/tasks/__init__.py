"""The kinds of data, a file each: what they are, how runs over them are scored, and what their figures show.

A module registers its tasks (`recurra.train.task`); all are imported when an experiment is looked up.
"""

from recurra._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
