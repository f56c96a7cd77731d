"""Tasks that show what a model can compute: state tracking, recall, counting."""
