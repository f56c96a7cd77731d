"""Published accuracies on tasks beside ours, with their sources and what differs."""

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from logdepth.report.table import Cell, Table
from logdepth.solving import SOLVED, SOLVERS, TaskResult, percent
from logdepth.tasks import LDRU_LANGUAGES, TASKS, Case

ENOUGH_SEEDS = 3
"""Seeds from which a median counts."""
Find = Callable[[Sequence[TaskResult]], str | None]
"""What our results say in one cell; None if they have nothing to say."""


def title_of_solver(name: str) -> str:
    """A model's name as tables print it."""
    return SOLVERS[name].title if name in SOLVERS else name


def is_encoder(name: str) -> bool:
    """Whether a model answers once per sequence."""
    return name in SOLVERS and SOLVERS[name].is_encoder


def is_solved(scores: Sequence[float]) -> bool:
    """Whether the median over enough seeds is high enough."""
    return len(scores) >= ENOUGH_SEEDS and statistics.median(scores) >= SOLVED


def spread(shares: Sequence[float]) -> str:
    """The median in per cent, and the lowest and highest of several."""
    middle = percent(statistics.median(shares))
    return f"{middle} [{percent(min(shares))}, {percent(max(shares))}]" if len(shares) > 1 else middle


def accuracies_at(results: Sequence[TaskResult], task: str, case: Case) -> dict[str, list[float]]:
    """Accuracies of all seeds in one test case, by language model. The best median comes first."""
    found: dict[str, list[float]] = {}
    for result in results:
        if result.task == task and not is_encoder(result.solver):
            for one in result.test:
                if one.case == case:
                    found.setdefault(result.solver, []).append(one.accuracy)
    return dict(sorted(found.items(), key=lambda pair: -statistics.median(pair[1])))


def scores_of(results: Sequence[TaskResult], task: str, solver: str) -> list[float]:
    """The scores of all seeds of a model on a task, over the test cases that all runs on the task have."""
    common = common_cases(results, task)
    return [one.score_over(common) for one in results if (one.task, one.solver) == (task, solver)]


def common_cases(results: Sequence[TaskResult], task: str) -> set[Case]:
    """The test cases that all runs on a task have: only scores over the same cases can be compared."""
    cases = [result.cases for result in results if result.task == task]
    return set.intersection(*cases) if cases else set()


def best_at(task: str, case: Case) -> Find:
    """The language model with the highest median in one test case."""

    def find(results: Sequence[TaskResult]) -> str | None:
        found = accuracies_at(results, task, case)
        if not found:
            return None
        best, shares = next(iter(found.items()))
        return f"{title_of_solver(best)}: {spread(shares)}, {_seeds(len(shares))}; of {len(found)} models"

    return find


def best_at_both(first: tuple[str, Case], second: tuple[str, Case]) -> Find:
    """The model whose lower median of two test cases is the highest."""

    def find(results: Sequence[TaskResult]) -> str | None:
        both = [accuracies_at(results, *one) for one in (first, second)]
        common = both[0].keys() & both[1].keys()
        if not common:
            return None
        best = max(sorted(common), key=lambda solver: min(statistics.median(one[solver]) for one in both))
        return f"{title_of_solver(best)}: {spread(both[0][best])} and {spread(both[1][best])}"

    return find


def languages_solved(encoders: bool) -> Find:
    """How many of the 21 regular languages the best model of a form solves."""

    def find(results: Sequence[TaskResult]) -> str | None:
        counts = []
        for solver in SOLVERS:
            scores = [scores_of(results, task, solver) for task in LDRU_LANGUAGES]
            run = [one for one in scores if one]
            if is_encoder(solver) == encoders and run:
                counts.append((sum(map(is_solved, run)), len(run), title_of_solver(solver)))
        if not counts:
            return None
        solved, run_on, title = max(counts, key=lambda one: one[:2])
        return f"{title}: {solved} of {run_on}"

    return find


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published result, and how to find ours."""

    what: str
    """What is measured, in per cent of right answers if nothing else is said."""
    tasks: tuple[str, ...]
    """Tasks on which it is measured."""
    published: str
    """What others report."""
    source: str
    """Who reports it."""
    target: str
    """What was aimed at, and in brackets what was hoped for."""
    differs: str
    """What differs from our setting."""
    ours: Find
    """Our result."""


MAMBA_3 = "Lahoti et al., arXiv 2603.15569"
FORTY = "There: up to 40 symbols in training. Here: the same, the median over seeds"
PUBLISHED = (
    Published(
        what="21 regular languages, one answer to strings of 41 to 500 symbols, solved",
        tasks=LDRU_LANGUAGES,
        published="MLP-LDRU: 100 on 18 of 21, ≥ 99.9 on the other 3 with longer strings in training",
        source="Pert et al., arXiv 2605.26035",
        target="18 (21)",
        differs="There: every length from 42; rejected strings are random; gradients are centred. Here: 53 lengths, "
        "even ones where odd strings are all rejected; near misses among the rejected; solved is ≥ 99.9",
        ours=languages_solved(encoders=True),
    ),
    Published(
        what="21 regular languages, an answer at every prefix, solved",
        tasks=LDRU_LANGUAGES,
        published="–",
        source="–",
        target="15 (21)",
        differs="–",
        ours=languages_solved(encoders=False),
    ),
    Published(
        what="S₅, every position of 512 elements",
        tasks=("s5",),
        published="DeltaProduct with 4 Householder factors solves it, DeltaNet does not; a prefix-scannable "
        "Transformer is good past 160",
        source="Siems et al., arXiv 2502.10297; Yau et al., arXiv 2506.10918",
        target="≥ 99.9 (99.99)",
        differs="There: trained on 128 elements, and on 4 to 18. Here: on 2 to 32",
        ours=best_at("s5", Case(512)),
    ),
    Published(
        what="S₅, every position of 65,536 elements",
        tasks=("s5",),
        published="–",
        source="–",
        target="shown (≥ 99.9)",
        differs="–",
        ours=best_at("s5", Case(65536)),
    ),
    Published(
        what="Parity of 256 bits",
        tasks=("parity",),
        published="Mamba-3: 100; Gated DeltaNet with eigenvalues in [−1, 1]: 100",
        source=MAMBA_3,
        target="100",
        differs=f"{FORTY}, an answer at every prefix",
        ours=best_at("parity", Case(256)),
    ),
    Published(
        what="Modular arithmetic without brackets, × first, 255 symbols",
        tasks=("modular-arithmetic-precedence",),
        published="Mamba-3: 98.5; Gated DeltaNet with eigenvalues in [−1, 1]: 99.3",
        source=MAMBA_3,
        target="≥ 99.3 (100)",
        differs=f"{FORTY}, an answer at every prefix",
        ours=best_at("modular-arithmetic-precedence", Case(255)),
    ),
    Published(
        what="Modular arithmetic with brackets, 256 symbols",
        tasks=("bracket-arithmetic",),
        published="Mamba-3: 87.8; Gated DeltaNet with eigenvalues in [−1, 1]: 93.5",
        source=MAMBA_3,
        target="≥ 93.5 (99)",
        differs=f"{FORTY}, one answer at the end",
        ours=best_at("bracket-arithmetic", Case(256)),
    ),
    Published(
        what="MQAR, 512 tokens with 128 pairs, width 128",
        tasks=("mqar",),
        published="attention: about 100; Gated DeltaNet and Log-Linear Attention: less",
        source="Arora et al., arXiv 2312.04927; Guo et al., arXiv 2506.04761",
        target="≥ 99 with attention (without)",
        differs="There: a fixed set of examples, the best of several learning rates. Here: always new ones, one rate",
        ours=best_at("mqar", Case(512, 128)),
    ),
    Published(
        what="Passkey of 5 digits in 65,536 tokens",
        tasks=("passkey",),
        published="–",
        source="–",
        target="shown (≥ 95)",
        differs="–",
        ours=best_at("passkey", Case(65536, 5)),
    ),
    Published(
        what="One model for S₅ at 512 and MQAR 256/64",
        tasks=("s5", "mqar"),
        published="none known",
        source="–",
        target="shown (≥ 99 on both)",
        differs="One config, trained on each task alone",
        ours=best_at_both(("s5", Case(512)), ("mqar", Case(256, 64))),
    ),
)
"""What was published, or aimed at, for the tasks of this library."""


def published_table(results: Sequence[TaskResult], tasks: Collection[str] = tuple(TASKS)) -> Table:
    """Published results beside ours, on some tasks."""
    rows: list[tuple[Cell, ...]] = [
        (one.what, one.published, one.source, one.ours(results), one.target, one.differs)
        for one in PUBLISHED
        if not set(one.tasks).isdisjoint(tasks)
    ]
    return Table(
        name="published",
        title="Published results and ours, in %",
        note="Ours: the best model by its median over seeds, and the lowest and highest seed in brackets. –: none, or "
        "not run. Others measured in other settings; the last column names the differences that matter.",
        heads=("measure", "published", "source", "ours", "target (stretch)", "differences"),
        rows=tuple(rows),
    )
