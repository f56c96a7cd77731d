"""The ledger: a read-only interpretation of a study's list of trials, on which all workers agree.

Optuna guarantees three things with every storage: trial numbers are unique and increase, only one worker receives a
waiting trial, and a finished trial never changes. Two rules turn these into exactly-once execution of every trial:

- A failed trial is continued by *the first* trial that names it (`RETRY_OF`). Several workers may add such a trial at
  the same time. All but the one with the lowest number are void, and a worker that receives a void trial drops it.
- A new trial counts if fewer than N counting trials have lower numbers. A race may create a surplus trial, which its
  worker marks (`SURPLUS`) and drops.

A trial of the sweep is therefore a chain of Optuna trials. The number of the first one, its origin, identifies it.
"""

from collections.abc import Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

RETRY_OF = "retry of"
"""Attribute: number of the failed trial that this trial continues."""
ORIGIN = "origin"
"""Attribute: number of the first trial of the chain."""
SURPLUS = "surplus"
"""Attribute: why the trial does not count."""
GIVEN_BACK = "given back"
"""Attribute: whether the worker stopped cleanly and returned the trial, rather than died."""
DEATHS = "deaths"
"""Attribute: number of workers that have died while running the trial."""
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


class Ledger:
    """A list of Optuna trials, grouped into chains."""

    def __init__(self, trials: Sequence[FrozenTrial]) -> None:
        self._trials = {trial.number: trial for trial in sorted(trials, key=lambda one: one.number)}
        self._retries: dict[int, int] = {}
        self._void: set[int] = set()
        for number, trial in self._trials.items():
            failed = trial.user_attrs.get(RETRY_OF)
            if failed is not None and self._retries.setdefault(failed, number) != number:
                self._void.add(number)
        self.origins = [number for number, trial in self._trials.items() if _counts(trial)]
        """Numbers of the first trials of all chains, ascending."""

    def attempts(self, origin: int) -> list[FrozenTrial]:
        """Return the chain of an origin, from the first attempt to the latest."""
        chain = [self._trials[origin]]
        while chain[-1].number in self._retries:
            chain.append(self._trials[self._retries[chain[-1].number]])
        return chain

    def latest(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the latest attempt of every chain whose latest attempt is in one of `states`."""
        ends = [self.attempts(origin)[-1] for origin in self.origins]
        return [trial for trial in ends if trial.state in states]

    def reason_to_drop(self, number: int, limit: int) -> str | None:
        """Return why a trial must not run in a study of `limit` trials; None if it must run."""
        if number in self._void:
            return "another attempt continues the same trial"
        if RETRY_OF in self._trials[number].user_attrs:
            return None
        before = sum(origin < number for origin in self.origins)
        return f"the study has {limit} trials" if before >= limit else None

    def is_finished(self, limit: int) -> bool:
        """Return whether the first `limit` trials of the sweep are all finished."""
        done = {origin_of(trial) for trial in self.latest(*FINISHED)}
        return len(self.origins) >= limit and all(origin in done for origin in self.origins[:limit])


def origin_of(trial: FrozenTrial) -> int:
    """Return the number of the first trial of a trial's chain."""
    number: int = trial.user_attrs.get(ORIGIN, trial.number)
    return number


def retry_of(failed: FrozenTrial) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters and attributes of a trial that continues a failed one."""
    params = failed.system_attrs.get("fixed_params", {}) | failed.params
    deaths = failed.user_attrs.get(DEATHS, 0) + (GIVEN_BACK not in failed.user_attrs)
    return params, {RETRY_OF: failed.number, ORIGIN: origin_of(failed), DEATHS: deaths}


def _counts(trial: FrozenTrial) -> bool:
    return RETRY_OF not in trial.user_attrs and SURPLUS not in trial.user_attrs
