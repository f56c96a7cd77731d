"""Watch: what those who ask for a run want of it while it is made. A study and a sweep have their own."""

from logdepth.progress import Part, Progress


class Watch:
    """Shows a bar and lets the run go on to its end."""

    def progress(self, total_steps: int, done: int) -> Progress | Part:
        """Where the run tells how far it is."""
        return Progress("training", total_steps, done=done)

    def must_stop(self) -> bool:
        """Asked after every step; the run then saves and raises Interrupted."""
        return False

    def validated(self, step: int, loss: float) -> None:
        """Told after every validation, with everything saved; what it raises ends the run."""
