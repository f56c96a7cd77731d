"""Log-depth recurrent language models: a learnable, non-associative operator swept over a balanced binary tree."""

from logdepth.scanning import ScanResult, ScanState, reduce, scan

__version__ = "0.1.0"
__all__ = ["ScanResult", "ScanState", "reduce", "scan"]
