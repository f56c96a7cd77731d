"""The parts of docs/performance.md: tables and figures, from what `measured` reads."""
