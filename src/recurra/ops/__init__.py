"""Operators: one public function each, a reference in plain torch, and kernels for CPUs and GPUs."""
