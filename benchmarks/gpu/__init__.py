"""What is measured on a CUDA card: speed (`python -m benchmarks.gpu`), golden, graphs, tuning, steps.
`benchmarks/gpu_queue.sh` runs them. Each takes `--dry`: tiny sizes on the CPU, through Triton's interpreter."""

import os
import sys

if "--dry" in sys.argv:  # before anything imports Triton, which reads it once
    os.environ["TRITON_INTERPRET"] = "1"
