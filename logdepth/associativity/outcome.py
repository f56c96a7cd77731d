"""What a study of associativity finds, as numbers. It knows neither how they were found nor how they are shown."""

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
    """The same law, layer and level in models that were never trained: mean and deviation over seeds."""

    distance: float
    deviation: float | None
    """None where there is one seed."""
    influence: float
    relative: float
    cosine: float


class InParts(NamedTuple):
    """An evaluation of a split in parts of about one size, from which errors can be told."""

    parts: Sequence[Evaluation]

    @property
    def whole(self) -> Evaluation:
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
        return [part.loss for part in self.parts]


class Kept(NamedTuple):
    """What a file keeps of an evaluation in parts: enough for all that is told of it."""

    whole: Evaluation
    """Without its loss by position."""
    losses: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Associativity:
    """Distances in one model and in untrained ones, and the trained one's perplexity with other trees."""

    context: int
    num_windows: int
    """Windows of text from which triples were taken."""
    distances: Sequence[Distance]
    untrained: Sequence[Sequence[Distance]]
    """The same, in a freshly initialised model for each seed from 0 on."""
    trees: Mapping[str, InParts | Kept]

    @classmethod
    def from_dict(cls, saved: Any, where: str) -> "Associativity":
        """What `as_dict` wrote; `where` it was read from is for the error where it is something else."""
        if not isinstance(saved, dict) or (saved.get("schema"), saved.get("version")) != (SCHEMA, VERSION):
            raise UserError(f"{where} does not hold what `logdepth associativity` writes, version {VERSION}")
        try:
            return cls(
                context=saved["context"],
                num_windows=saved["windows"],
                distances=[_distance(one) for one in saved["distances"]],
                untrained=[[_distance(one) for one in seed] for seed in saved["untrained"]],
                trees={one["tree"]: _kept(one) for one in saved["trees"]},
            )
        except (KeyError, TypeError) as error:
            raise UserError(f"{where} is damaged or was changed ({error}); make it again") from None

    @property
    def num_layers(self) -> int:
        return 1 + max(one.layer for one in self.distances)

    def over_seeds(self, trained: Distance) -> Untrained | None:
        """What stands beside a distance of the trained model; None where no untrained one was asked for."""
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
        """Token perplexity with a tree, over that with the scan."""
        return perplexity(self.trees[tree].whole.loss - self.trees[SCAN].whole.loss)

    def error_over_scan(self, tree: str) -> float | None:
        """Standard error of that ratio: the two losses are compared part by part. None where there is one part, or a
        loss or ratio without end."""
        pairs = zip(self.trees[tree].losses, self.trees[SCAN].losses, strict=True)
        more = [other - scan for other, scan in pairs]
        over_scan = self.over_scan(tree)
        told = len(more) > 1 and all(map(math.isfinite, (*more, over_scan)))
        return over_scan * statistics.stdev(more) / math.sqrt(len(more)) if told else None

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
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
    """What `_finite` made of it; it does not tell infinity from what is no number."""
    return math.nan if saved is None else saved


def _jsonable(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _finite(value) if isinstance(value, float) else value for name, value in fields.items()}


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
