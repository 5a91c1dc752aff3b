"""What is measured on a CUDA card: speed (`python -m benchmarks.gpu`), golden, tuning, steps. `benchmarks/gpu_queue.sh`
runs all of it in one go. Each takes `--dry`: tiny sizes on the CPU, through Triton's interpreter."""
