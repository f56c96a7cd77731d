"""The parts of docs/results.md and of the README's table: a module a subject, all from what `kept` reads."""
