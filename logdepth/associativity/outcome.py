"""The results of a study of associativity, and their conversion to and from JSON."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from logdepth.associativity.triples import LAWS, Distance
from logdepth.errors import UserError
from logdepth.evaluate import Evaluation, perplexity

SCHEMA = "logdepth.associativity"
VERSION = 1
SCAN = "scan"
"""The name of the tree that the model was trained with."""


class Untrained(NamedTuple):
    """The distance of one law, layer and level in untrained models: mean and standard deviation over seeds."""

    distance: float
    deviation: float | None
    """Standard deviation of the distance; None if there is one seed."""
    influence: float
    relative: float
    cosine: float


class InParts(NamedTuple):
    """The evaluation of a split in parts of about equal size, from which standard errors are estimated."""

    parts: Sequence[Evaluation]

    @property
    def whole(self) -> Evaluation:
        """The evaluation of the whole split."""
        first = self.parts[0]
        return replace(
            first,
            tokens=sum(part.tokens for part in self.parts),
            nats=math.fsum(part.nats for part in self.parts),
            position_nats=sum((part.position_nats for part in self.parts[1:]), first.position_nats),
            position_tokens=sum((part.position_tokens for part in self.parts[1:]), first.position_tokens),
        )

    @property
    def losses(self) -> Sequence[float]:
        """The loss of each part."""
        return [part.loss for part in self.parts]


class Kept(NamedTuple):
    """An evaluation in parts as read from a file."""

    whole: Evaluation
    """The evaluation of the whole split, without loss by position."""
    losses: Sequence[float]
    """The loss of each part."""


@dataclass(frozen=True, kw_only=True)
class Associativity:
    """Distances in a trained model and in untrained ones, and the trained model's perplexity with other trees."""

    context: int
    """Tokens per window."""
    num_windows: int
    """Number of windows from which triples were taken."""
    distances: Sequence[Distance]
    """Distances in the trained model."""
    untrained: Sequence[Sequence[Distance]]
    """Distances in freshly initialised models, one sequence per seed 0, 1, …"""
    trees: Mapping[str, InParts | Kept]
    """Maps the names of trees to the evaluations of the trained model with them."""

    @classmethod
    def from_dict(cls, saved: Any, where: str) -> "Associativity":
        """Create the object from the output of `as_dict`. Errors name its source, `where`."""
        if not isinstance(saved, dict) or (saved.get("schema"), saved.get("version")) != (SCHEMA, VERSION):
            raise UserError(f"{where} is not an output of `logdepth associativity` in version {VERSION}; make it again")
        try:
            return cls(
                context=saved["context"],
                num_windows=saved["windows"],
                distances=[_distance(one) for one in saved["distances"]],
                untrained=[[_distance(one) for one in seed] for seed in saved["untrained"]],
                trees={one["tree"]: _kept(one) for one in saved["trees"]},
            )
        except (KeyError, TypeError) as error:
            raise UserError(f"{where} is damaged or was edited ({error}); make it again") from None

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return 1 + max(one.layer for one in self.distances)

    def over_seeds(self, trained: Distance) -> Untrained | None:
        """Return the untrained models' counterpart of a distance; None if no untrained models were measured."""
        same = [one for seed in self.untrained for one in seed if one[:3] == trained[:3]]
        if not same:
            return None
        values = [one.distance for one in same]
        return Untrained(
            distance=statistics.fmean(values),
            deviation=statistics.stdev(values) if len(values) > 1 else None,
            influence=statistics.fmean(one.influence for one in same),
            relative=statistics.fmean(one.relative for one in same),
            cosine=statistics.fmean(one.cosine for one in same),
        )

    def over_scan(self, tree: str) -> float:
        """Return the token perplexity with a tree divided by that with the scan."""
        return perplexity(self.trees[tree].whole.loss - self.trees[SCAN].whole.loss)

    def error_over_scan(self, tree: str) -> float | None:
        """Return the standard error of `over_scan`, from the losses of matching parts.

        Return None if there is only one part, or if a loss or the ratio is not finite.
        """
        pairs = zip(self.trees[tree].losses, self.trees[SCAN].losses, strict=True)
        differences = [other - scan for other, scan in pairs]
        over_scan = self.over_scan(tree)
        is_finite = len(differences) > 1 and all(map(math.isfinite, (*differences, over_scan)))
        return over_scan * statistics.stdev(differences) / math.sqrt(len(differences)) if is_finite else None

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as a JSON-compatible dict."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "context": self.context,
            "windows": self.num_windows,
            "laws": LAWS,
            "distances": [_jsonable(one._asdict() | {"untrained": self._beside(one)}) for one in self.distances],
            "untrained": [[_jsonable(one._asdict()) for one in seed] for seed in self.untrained],
            "trees": [
                _jsonable(
                    {
                        "tree": tree,
                        "perplexity_over_scan": self.over_scan(tree),
                        "error_over_scan": self.error_over_scan(tree),
                        **found.whole.as_dict(),
                        "part_losses": [_finite(loss) for loss in found.losses],
                    }
                )
                for tree, found in self.trees.items()
            ],
        }

    def _beside(self, trained: Distance) -> dict[str, Any] | None:
        untrained = self.over_seeds(trained)
        return None if untrained is None else _jsonable(untrained._asdict())


def _distance(saved: dict[str, Any]) -> Distance:
    numbers = {name: _number(saved[name]) for name in ("distance", "influence", "relative", "cosine")}
    return Distance(**{name: saved[name] for name in Distance._fields} | numbers)


def _kept(saved: dict[str, Any]) -> Kept:
    names = ("corpus", "split", "context", "stride", "tokens", "words", "bytes", "separator", "unknown")
    whole = Evaluation(
        **{name: saved[name] for name in names},
        nats=_number(saved["nats"]),
        position_nats=np.zeros(0),
        position_tokens=np.zeros(0, dtype=np.int64),
    )
    return Kept(whole, [_number(loss) for loss in saved["part_losses"]])


def _number(saved: float | None) -> float:
    """Convert a value written by `_finite` back. None becomes NaN, although it may have been an infinity."""
    return math.nan if saved is None else saved


def _jsonable(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _finite(value) if isinstance(value, float) else value for name, value in fields.items()}


def _finite(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
