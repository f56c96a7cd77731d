"""Studies: the paper's experiment on a corpus, architectures side by side, and models on generated tasks."""

from logdepth.reproduce.study import Study, study_of
from logdepth.reproduce.tasks import TASK_STUDIES, TaskStudy, run_task_study, task_runs
from logdepth.reproduce.work import StudyOutcome, run_study

__all__ = [
    "TASK_STUDIES",
    "Study",
    "StudyOutcome",
    "TaskStudy",
    "run_study",
    "run_task_study",
    "study_of",
    "task_runs",
]
