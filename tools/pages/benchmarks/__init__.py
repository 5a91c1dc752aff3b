"""The page docs/benchmarks.md: time and memory over the length of a sequence, measured and drawn."""
