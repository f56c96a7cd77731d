"""Programs that try to break the library: damaged files, edits, command lines, corpora, kills. See CONTRIBUTING.md."""
