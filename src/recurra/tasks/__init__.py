"""The kinds of data, a file each: what they are, how runs over them are scored, and what their figures show.

A module registers its tasks (`recurra.training.task`); all are imported when an experiment is looked up.
"""
