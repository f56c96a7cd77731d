"""Plans kept for reuse: a training loop builds the plan of each shape once. Bounded by the bytes of their indices."""

from collections import OrderedDict
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from logdepth.scanning.arguments import Layout
from logdepth.scanning.plan import Ints, Plan, build_plan

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
        self,
        old: Ints,
        layout: Layout,
        prefixed: NDArray[np.bool_],
        device: torch.device,
        every_prefix: bool = True,
    ) -> Plan:
        """The plan for these lengths, with its indices on `device`; arguments as for `build_plan`."""
        key = (
            old.tobytes(), layout.new.tobytes(), prefixed.tobytes(), layout.row_stride, layout.num_elements, device, every_prefix
        )
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                return plan
        plan = build_plan(
            old, layout.new, prefixed, layout.starts, layout.num_elements, every_prefix, lambda index: _on(device, index)
        )
        with self._lock:
            self.num_built += 1
            if key not in self._plans:
                self._plans[key] = plan
                self.num_bytes += plan.nbytes + PLAN_OVERHEAD_BYTES
            while self.num_bytes > self.max_bytes and len(self._plans) > 1:
                _, oldest = self._plans.popitem(last=False)
                self.num_bytes -= oldest.nbytes + PLAN_OVERHEAD_BYTES
        return plan

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self.num_bytes = 0


PLANS = PlanCache(MAX_CACHE_BYTES)


def _on(device: torch.device, index: Ints) -> torch.Tensor:
    tensor = torch.from_numpy(index)
    # From pinned memory the copy needs no synchronisation with the device.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
