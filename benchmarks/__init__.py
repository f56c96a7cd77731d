"""Time and memory, as ratios within one run."""
