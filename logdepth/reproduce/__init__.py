"""The paper's experiment on a corpus: all models, all seeds, measured and timed."""

from logdepth.reproduce.study import Study, study_of
from logdepth.reproduce.work import work_on

__all__ = ["Study", "study_of", "work_on"]
