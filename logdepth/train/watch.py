"""Watch: what those who ask for a run want of it while it is made. A study and a sweep have their own."""

from logdepth.progress import Part, Progress


class Watch:
    """Shows a bar and lets the run go on to its end."""

    def started(self, total_steps: int) -> None:
        """Told before anything else, of a run that is finished already too; its metrics are those that hold."""

    def progress(self, total_steps: int, done: int) -> Progress | Part:
        """Where the run tells how far it is."""
        return Progress("training", total_steps, done=done)

    def must_stop(self) -> bool:
        """Asked after every step; the run then saves and raises Interrupted."""
        return False

    def validated(self, step: int, loss: float, *, over: bool) -> None:
        """Told after every validation; what it raises ends a run that is not over."""
