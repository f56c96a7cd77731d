"""The ledger: what a study's list of trials says, the same to every worker whenever it looks. It changes nothing.

Optuna gives three promises, whatever the storage: numbers are unique and grow, a waiting trial is taken by one worker
only, and a trial that is over stays as it is. Two rules make of them that every trial is done once and none is lost:

- A trial that failed is gone on with by *the first* trial that says so (`RETRY_OF`). Several workers may add one at the
  same time; all but the one with the lowest number are void, and whoever gets a void one drops it.
- A new trial counts if fewer than N that count have lower numbers. One too many, from a race, is marked and dropped.

So a trial of the sweep is a chain of Optuna's trials, known by the number of its first: its origin.
"""

from collections.abc import Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

RETRY_OF = "retry of"
"""The failed trial that this one goes on with."""
ORIGIN = "origin"
"""The first of its chain."""
SURPLUS = "surplus"
"""Why a trial does not count."""
GIVEN_BACK = "given back"
"""Its worker stopped in good order, rather than died."""
DEATHS = "deaths"
"""Workers that died on it before."""
OVER = (TrialState.COMPLETE, TrialState.PRUNED)


class Ledger:
    """A list of trials, by chains."""

    def __init__(self, trials: Sequence[FrozenTrial]) -> None:
        self._trials = {trial.number: trial for trial in sorted(trials, key=lambda one: one.number)}
        self._retries: dict[int, int] = {}
        self._void: set[int] = set()
        for number, trial in self._trials.items():
            failed = trial.user_attrs.get(RETRY_OF)
            if failed is not None and self._retries.setdefault(failed, number) != number:
                self._void.add(number)
        self.origins = [number for number, trial in self._trials.items() if _counts(trial)]
        """Numbers of the first trials of all chains, in order."""

    def attempts(self, origin: int) -> list[FrozenTrial]:
        """The chain of an origin, the latest last."""
        chain = [self._trials[origin]]
        while chain[-1].number in self._retries:
            chain.append(self._trials[self._retries[chain[-1].number]])
        return chain

    def latest(self, *states: TrialState) -> list[FrozenTrial]:
        """The latest attempt of every origin, where it is in one of these states."""
        ends = [self.attempts(origin)[-1] for origin in self.origins]
        return [trial for trial in ends if trial.state in states]

    def dropped(self, number: int, limit: int) -> str | None:
        """Why a trial must not be done, if so, where a study has `limit` of them."""
        if number in self._void:
            return "another goes on with the same trial"
        if RETRY_OF in self._trials[number].user_attrs:
            return None
        before = sum(origin < number for origin in self.origins)
        return f"the study has {limit} trials" if before >= limit else None

    def is_over(self, limit: int) -> bool:
        """Whether the first `limit` are all done."""
        done = {origin_of(trial) for trial in self.latest(*OVER)}
        return len(self.origins) >= limit and all(origin in done for origin in self.origins[:limit])


def origin_of(trial: FrozenTrial) -> int:
    number: int = trial.user_attrs.get(ORIGIN, trial.number)
    return number


def retry_of(failed: FrozenTrial) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and attributes of the trial that goes on with a failed one."""
    params = failed.system_attrs.get("fixed_params", {}) | failed.params
    deaths = failed.user_attrs.get(DEATHS, 0) + (GIVEN_BACK not in failed.user_attrs)
    return params, {RETRY_OF: failed.number, ORIGIN: origin_of(failed), DEATHS: deaths}


def _counts(trial: FrozenTrial) -> bool:
    return RETRY_OF not in trial.user_attrs and SURPLUS not in trial.user_attrs
