"""Benchmarks of time and memory, as ratios within one run."""
