"""Operators: one front door each, a reference in plain torch, kernels for CPUs and GPUs."""
