"""The paper's experiment on a corpus: all models are trained with all seeds, evaluated and timed."""

from logdepth.reproduce.study import Study, study_of
from logdepth.reproduce.work import run_study

__all__ = ["Study", "run_study", "study_of"]
