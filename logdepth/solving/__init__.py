"""Solving tasks: models, their training on a task, and the accuracy that they reach."""

from logdepth.solving.accuracy import FEW_CLASSES, Accuracy, beyond, chance_of, measure_case
from logdepth.solving.config import TaskRunConfig, TaskTrainConfig, decisive, refuse_change
from logdepth.solving.result import (
    SOLVED,
    TaskResult,
    holds_task_results,
    percent,
    read_task_result,
    read_task_results,
    refuse_mixed_settings,
    write_task_result,
)
from logdepth.solving.solver import (
    SOLVERS,
    Form,
    Questions,
    Solver,
    SolverConfig,
    SolverKind,
    build_solver,
    solver_kind,
)
from logdepth.solving.training import DIVERGED, SolverState, SolverTrainer, read_checkpoint, refuse_odd_solver

__all__ = [
    "DIVERGED",
    "FEW_CLASSES",
    "SOLVED",
    "SOLVERS",
    "Accuracy",
    "Form",
    "Questions",
    "Solver",
    "SolverConfig",
    "SolverKind",
    "SolverState",
    "SolverTrainer",
    "TaskResult",
    "TaskRunConfig",
    "TaskTrainConfig",
    "beyond",
    "build_solver",
    "chance_of",
    "decisive",
    "holds_task_results",
    "measure_case",
    "percent",
    "read_checkpoint",
    "read_task_result",
    "read_task_results",
    "refuse_change",
    "refuse_mixed_settings",
    "refuse_odd_solver",
    "solver_kind",
    "write_task_result",
]
