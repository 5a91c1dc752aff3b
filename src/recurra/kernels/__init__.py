"""The toolkit of all CPU kernels: vectors, launching, what a kernel is made of, the fork guard, FLOP formulas."""
