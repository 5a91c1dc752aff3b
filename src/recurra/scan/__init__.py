"""Scans of h_t = a_t h_{t-1} + b_t, by kernels and by textbook algorithms."""

from recurra.scan.associative import associative_scan, linear_recurrence, matrix_recurrence
from recurra.scan.convolution import convolution_scan
from recurra.scan.linear import linear_scan
from recurra.scan.sharded import sharded_scan

__all__ = [
    "associative_scan",
    "convolution_scan",
    "linear_recurrence",
    "linear_scan",
    "matrix_recurrence",
    "sharded_scan",
]
