"""Measurements: `make bench`. Ratios within one run, medians; nothing here is a test."""
