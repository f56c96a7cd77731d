"""Watch: callbacks of a run, for whoever started it. Studies and sweeps have their own subclasses."""

from logdepth.progress import Part, Progress


class Watch:
    """Shows a progress bar and never stops the run."""

    def started(self, total_steps: int) -> None:
        """Called first, even if the run is finished; the lines in its metrics are final from then on."""

    def progress(self, total_steps: int, done: int) -> Progress | Part:
        """The display that receives the progress of the run."""
        return Progress("training", total_steps, done=done)

    def must_stop(self) -> bool:
        """Called after every step. If True, the run saves and raises Interrupted."""
        return False

    def validated(self, step: int, loss: float, *, over: bool) -> None:
        """Called after every validation; an exception raised here ends a run that is not over."""
