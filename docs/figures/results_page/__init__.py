"""The parts of docs/results.md, the pages in docs/results/ and the README's table: one module per subject."""
