"""States that clients have saved: tokens and the snapshot after them, by an id that cannot be guessed."""

import secrets
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logdepth.serve.responses import ApiError
from logdepth.serve.snapshots import Holdings, Snapshot


@dataclass(frozen=True, eq=False)
class SavedState:
    """A state as its client sees it. Forks share tokens and snapshot."""

    id: str
    owner: int | None
    """The API key that it belongs to."""
    tokens: NDArray[np.int32]
    snapshot: Snapshot
    created: int

    @property
    def nbytes(self) -> int:
        """Bytes of the state alone."""
        return self.snapshot.nbytes + self.tokens.nbytes

    def body(self, model: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "state",
            "created": self.created,
            "model": model,
            "tokens": len(self.tokens),
            "bytes": self.nbytes,
        }


class SavedStates:
    """The states of all clients, within bounds."""

    def __init__(self, max_states: int, max_bytes: int) -> None:
        self.max_states, self.max_bytes = max_states, max_bytes
        self._states: dict[str, SavedState] = {}
        self._holdings = Holdings()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes of all states; what they share counts once."""
        return self._holdings.nbytes + sum(one.tokens.nbytes for one in self._states.values())

    def refuse_if_full(self) -> None:
        """Raise an ApiError if there is room for no more."""
        if len(self) >= self.max_states or self.nbytes > self.max_bytes:
            raise ApiError(
                429,
                f"{len(self):,} states of {self.nbytes:,} bytes are saved, and no more are allowed: delete some",
                code="too_many_states",
            )

    def save(self, owner: int | None, tokens: NDArray[np.int32], snapshot: Snapshot) -> SavedState:
        """Save a state under a new id."""
        self.refuse_if_full()
        saved = SavedState(f"state-{secrets.token_hex(16)}", owner, tokens, snapshot, int(time.time()))
        self._states[saved.id] = saved
        self._holdings.add(snapshot)
        return saved

    def get(self, owner: int | None, name: str) -> SavedState:
        """The state with an id, if it belongs to this API key."""
        found = self._states.get(name)
        if found is None or found.owner != owner:
            raise ApiError(404, "there is no state with this id", param="state", code="state_not_found")
        return found

    def all(self, owner: int | None) -> list[SavedState]:
        return [one for one in self._states.values() if one.owner == owner]

    def delete(self, owner: int | None, name: str) -> None:
        saved = self.get(owner, name)
        del self._states[saved.id]
        self._holdings.remove(saved.snapshot)
