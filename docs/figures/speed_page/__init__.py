"""The parts of docs/performance.md and of the pages in docs/performance/: tables and figures."""
