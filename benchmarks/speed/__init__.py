"""The parts of benchmarks/gpu.py: what is measured, how, and which bars it is held against."""
