"""Plans kept for reuse: a training loop builds the plan of each shape once. Bounded by the bytes of their indices."""

from collections import OrderedDict
from functools import partial
from threading import Lock

import torch

from logdepth.capture import keep
from logdepth.scanning.arguments import Layout
from logdepth.scanning.device_index import index_on
from logdepth.scanning.lengths import Lengths
from logdepth.scanning.plan import Plan, build_plan

MAX_CACHE_BYTES = 128 * 2**20
PLAN_OVERHEAD_BYTES = 16 * 2**10
"""What a plan counts for beside its indices, so that many small plans are bounded too."""


class PlanCache:
    """The most recently used plans, up to a number of bytes; the newest is kept whatever its size."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_built = 0
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._lock = Lock()

    def plan(
        self, below: Lengths, above: Lengths, layout: Layout, device: torch.device, every_prefix: bool = True
    ) -> Plan:
        """The plan for rows that get the elements of `layout`, with its indices on `device`.

        `below` and `above` are the lengths so far within and above the levels that the new elements touch. Of what is
        above, only whether there is anything matters: so every step of a stream finds one of a few plans.
        """
        prefixed = above.common > 0 if above.common is not None else (above.array() > 0).tobytes()
        key = (below.key, prefixed, layout.new.key, layout.row_stride, device, every_prefix)
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                keep(plan)
                return plan
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("cannot plan a scan of new lengths while a CUDA graph is captured: run it once before")
        plan = build_plan(
            old=below.array(),
            new=layout.new.array(),
            prefixed=above.array() > 0,
            starts=layout.starts(),
            num_elements=layout.num_elements,
            every_prefix=every_prefix,
            as_index=partial(index_on, device),
        )
        with self._lock:
            self.num_built += 1
            # Under a mode that makes tensors of its own kind (fake ones, say), the indices are of that kind.
            if key not in self._plans and type(torch.empty(0)) is torch.Tensor:
                self._plans[key] = plan
                self.num_bytes += _bytes_of(plan)
            while self.num_bytes > self.max_bytes and len(self._plans) > 1:
                _, oldest = self._plans.popitem(last=False)
                self.num_bytes -= _bytes_of(oldest)
        return plan

    def keep_with(self, plan: Plan, name: str, thing: object, *, nbytes: int) -> None:
        """Keeps what was worked out from a plan for as long as the plan, and counts its bytes."""
        with self._lock:
            plan.derived[name] = thing
            plan.derived_nbytes[name] = nbytes
            if any(one is plan for one in self._plans.values()):
                self.num_bytes += nbytes

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self.num_bytes = 0


def _bytes_of(plan: Plan) -> int:
    return PLAN_OVERHEAD_BYTES + plan.nbytes + sum(plan.derived_nbytes.values())


PLANS = PlanCache(MAX_CACHE_BYTES)
