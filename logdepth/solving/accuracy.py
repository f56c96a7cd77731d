"""How often a solver answers right, case by case, on examples that no training step has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from logdepth.ops.cross_entropy import IGNORED
from logdepth.ops.precision import Precision, arithmetic
from logdepth.solving.solver import Form, Questions, Solver
from logdepth.tasks import Case, Task, held_out_batch

BATCH_TOKENS = 2**17
"""Tokens that are tested at the same time, at most; a longer sequence comes alone."""
TEST_TOKENS = 2**19
"""Tokens of the test of one case, at most: at long lengths it has fewer sequences."""
TEST_SEQUENCES = 512
MIN_SEQUENCES = 8
CHECK_SEQUENCES: dict[Form, int] = {"whole": 256, "prefixes": 64}
"""Sequences of a case in checks during training, by where answers are asked: an encoder gives one per sequence."""
FEW_CLASSES = 32
"""Up to this many classes, accuracies weight them equally."""
TESTS, CHECKS = 0, 1
"""Streams of examples: results are measured on the one, and decisions during training on the other."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Counts of right answers in one case."""

    length: int
    """Length of the case."""
    items: int
    """Items of the case, such as pairs to remember; 0 if it has none."""
    sequences: int
    """Number of sequences."""
    asked: int
    """Number of answers asked in all sequences."""
    right: int
    """Number of right answers."""
    last_right: int
    """Number of sequences whose last asked answer is right."""
    classes: tuple[tuple[int, ...], ...] = ()
    """For each class, how often it was the right answer, and how often it was given then; empty if classes are many."""

    def __post_init__(self) -> None:
        if self.length < 1 or self.items < 0 or self.sequences < 1:
            raise ValueError("length and sequences must be at least 1, and items at least 0")
        if not (self.sequences <= self.asked and 0 <= self.right <= self.asked):
            raise ValueError(f"{self.right} of {self.asked} answers of {self.sequences} sequences cannot be right")
        if not 0 <= self.last_right <= min(self.sequences, self.right):
            raise ValueError(f"{self.last_right} last answers of {self.sequences} sequences cannot be right")
        if any(len(one) != 2 or not 0 <= one[1] <= one[0] for one in self.classes):
            raise ValueError("each class must have two counts, of which the second is not larger than the first")
        if self.classes and (self.asked, self.right) != tuple(map(sum, zip(*self.classes, strict=True))):
            raise ValueError("the counts of all classes must add up to asked and right")

    @property
    def case(self) -> Case:
        return Case(self.length, self.items)

    @property
    def share_right(self) -> float:
        """Share of right answers."""
        return self.right / self.asked

    @property
    def accuracy(self) -> float:
        """Share of right answers, with equal weight for each class if classes are few.

        A constant answer then scores one over the number of classes, however rare some of them are.
        """
        shares = [right / asked for asked, right in self.classes if asked]
        return sum(shares) / len(shares) if shares else self.share_right

    @property
    def last_accuracy(self) -> float:
        """Share of sequences whose last answer is right."""
        return self.last_right / self.sequences


def chance_of(task: Task) -> float:
    """The accuracy of the best constant answer, as `Accuracy.accuracy` weights answers."""
    return 1 / task.num_classes if task.num_classes <= FEW_CLASSES else task.chance


def num_sequences(case: Case) -> int:
    """How many sequences the test of a case has."""
    return max(min(MIN_SEQUENCES, TEST_SEQUENCES), min(TEST_SEQUENCES, TEST_TOKENS // case.length))


def measure_case(
    solver: Solver,
    task: Task,
    form: Form,
    case: Case,
    *,
    seed: int = 0,
    sequences: int | None = None,
    stream: int = TESTS,
    precision: Precision = "auto",
    stop_if_asked: Callable[[], None] = lambda: None,
) -> Accuracy:
    """The accuracy in one case. The same seed and stream give all solvers the same examples."""
    device = next(solver.parameters()).device
    total = sequences or num_sequences(case)
    was_training = solver.training
    solver.eval()
    last_right = done = number = 0
    by_class = torch.zeros(2, task.num_classes, dtype=torch.int64)
    try:
        while done < total:
            batch = min(total - done, max(1, BATCH_TOKENS // case.length))
            # The numbers of one stream are even and those of the other odd.
            examples = held_out_batch(task, seed, case, batch, 2 * number + stream)
            questions = Questions.of(examples, form, device)
            with torch.no_grad(), arithmetic(precision, device):
                answers = solver.answers(questions.tokens, questions.places)
            is_right, counts = answers == questions.targets, questions.targets != IGNORED
            for place, chosen in enumerate((counts, is_right & counts)):
                by_class[place] += torch.bincount(questions.targets[chosen], minlength=task.num_classes).cpu()
            last_right += _last_right(is_right.view(batch, -1), counts.view(batch, -1))
            done += batch
            number += 1
            stop_if_asked()
    finally:
        solver.train(was_training)
    asked, right = by_class.sum(dim=1).tolist()
    return Accuracy(
        length=case.length,
        items=case.items,
        sequences=total,
        asked=asked,
        right=right,
        last_right=last_right,
        classes=tuple(zip(*by_class.tolist(), strict=True)) if task.num_classes <= FEW_CLASSES else (),
    )


def _last_right(is_right: torch.Tensor, counts: torch.Tensor) -> int:
    """In how many rows the last answer that counts is right."""
    place = torch.arange(counts.shape[1], device=counts.device)
    last = torch.where(counts, place, -1).argmax(dim=1, keepdim=True)
    return int(is_right.gather(1, last).sum())


def beyond(task: Task, cases: Sequence[Case]) -> list[Case]:
    """The cases that are longer, or have more items, than all of training."""
    longest = max(case.length for case in task.train_cases)
    most = max(case.items for case in task.train_cases)
    return [case for case in cases if case.length > longest or case.items > most]
