"""A cache of plans, so that a training loop builds the plan of each shape once. Its size in bytes is bounded.

A plan is whatever depends on lengths only: index lists of a scan, of a tree's readers, or of a block of a model.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from threading import Lock
from typing import Protocol, TypeVar, cast

import torch

from logdepth.keep_alive import keep
from logdepth.scanning.arguments import Layout
from logdepth.scanning.device_index import index_on
from logdepth.scanning.lengths import Lengths
from logdepth.scanning.plan import Plan, build_plan

MAX_CACHE_BYTES = 128 * 2**20
PLAN_OVERHEAD_BYTES = 16 * 2**10
"""Bytes counted per plan in addition to its indices, so that the number of small plans is bounded too."""


class Sized(Protocol):
    """A plan of any kind."""

    @property
    def nbytes(self) -> int:
        """Bytes of its index arrays."""
        ...


T = TypeVar("T", bound=Sized)


class PlanCache:
    """A least-recently-used cache of plans with a maximum size in bytes. The newest plan is kept regardless of size."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_built = 0
        self._plans: OrderedDict[Hashable, Sized] = OrderedDict()
        self._lock = Lock()

    def plan(
        self, below: Lengths, above: Lengths, layout: Layout, device: torch.device, every_prefix: bool = True
    ) -> Plan:
        """Return the plan for rows that receive the elements of `layout`, with its indices on `device`.

        `below` and `above` are the old lengths within and above the levels that the new elements change. A plan depends
        only on whether `above` is zero, so that the steps of a stream share a few plans.
        """
        prefixed = above.common > 0 if above.common is not None else (above.array() > 0).tobytes()
        key = (below.key, prefixed, layout.new.key, layout.row_stride, device, every_prefix)

        def build() -> Plan:
            return build_plan(
                old=below.array(),
                new=layout.new.array(),
                prefixed=above.array() > 0,
                starts=layout.starts(),
                num_elements=layout.num_elements,
                every_prefix=every_prefix,
                as_index=partial(index_on, device),
            )

        return self.get(key, device, build)

    def get(self, key: Hashable, device: torch.device, build: Callable[[], T]) -> T:
        """Return the plan with this key, whose indices are on `device`. It is built if it is not in the cache."""
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
                keep(found)
                return cast(T, found)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "cannot plan a scan of new lengths during CUDA graph capture; run it once before the capture"
            )
        plan = build()
        with self._lock:
            self.num_built += 1
            # Under a mode with its own tensor type, such as FakeTensorMode, the indices are unusable outside the mode.
            if key not in self._plans and type(torch.empty(0)) is torch.Tensor:
                self._plans[key] = plan
                self.num_bytes += _bytes_of(plan)
            while self.num_bytes > self.max_bytes and len(self._plans) > 1:
                _, oldest = self._plans.popitem(last=False)
                self.num_bytes -= _bytes_of(oldest)
        return plan

    def keep_with(self, plan: Plan, name: str, thing: object, *, nbytes: int) -> None:
        """Cache an object derived from a plan as long as the plan, and count its bytes."""
        with self._lock:
            plan.derived[name] = thing
            plan.derived_nbytes[name] = nbytes
            if any(one is plan for one in self._plans.values()):
                self.num_bytes += nbytes

    def clear(self) -> None:
        """Remove all plans."""
        with self._lock:
            self._plans.clear()
            self.num_bytes = 0


def _bytes_of(plan: Sized) -> int:
    derived = sum(plan.derived_nbytes.values()) if isinstance(plan, Plan) else 0
    return PLAN_OVERHEAD_BYTES + plan.nbytes + derived


PLANS = PlanCache(MAX_CACHE_BYTES)
