"""Faults on purpose: damaged files, disks that fail, and what becomes of them."""
