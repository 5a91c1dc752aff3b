"""Scans of h_t = a_t h_{t-1} + b_t, by kernels and by textbook algorithms."""

from recurra.ops.scan.convolution import convolution_scan
from recurra.ops.scan.operator import linear_scan
from recurra.ops.scan.reference import associative_scan, linear_recurrence, matrix_recurrence

__all__ = [
    "associative_scan",
    "convolution_scan",
    "linear_recurrence",
    "linear_scan",
    "matrix_recurrence",
]
