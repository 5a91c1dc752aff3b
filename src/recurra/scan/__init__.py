"""Scans: h_t = a_t h_{t-1} + b_t by the textbook's algorithms and by kernels."""

from recurra.scan.linear import linear_scan

__all__ = ["linear_scan"]
