"""Faults on purpose: damaged files, and what becomes of them."""
