"""LogDepthCache: the state of a batch in the form that `generate` expects, O(log n) plus the windows of attention."""

import copy
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers import Cache

from logdepth.decoding import Decoder
from logdepth.hf.rows import Rows
from logdepth.models import LM, LMState
from logdepth.ops.dispatch import outside_compiled_graphs


class LogDepthCache(Cache):
    """The state of a batch, which each call of the model replaces by the state after its tokens.

    A new cache is empty; the first call that gets it fills it. The state itself is never changed in place, so
    `copy.deepcopy(cache)` copies nothing: a prompt that was read once can be continued many times.

    Tokens that come one by one without gradients are absorbed by a Decoder, which is faster. It takes the model's
    weights as they are at its first token.
    """

    def __init__(self, state: LMState | None = None) -> None:
        super().__init__(layers=[])
        self._state = state
        self._decoder: Decoder | None = None
        self._columns = 0 if state is None else int(state.lengths.max())
        self._is_beam_search = False
        """Whether rows have been reordered since the last call with several tokens. A Decoder would then copy the
        whole state at every token."""
        self.features: Tensor | None = None
        """What the head read last in each row, `[batch, dim]`, where it is known: a row may get no token in a call."""

    @property
    def state(self) -> LMState | None:
        """The state after the tokens so far; None before the first."""
        return self._state if self._decoder is None else self._decoder.state()

    @property
    def nbytes(self) -> int:
        """Bytes of the state on its device."""
        held = self._state if self._decoder is None else self._decoder
        return 0 if held is None else held.nbytes

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first token."""
        if self._decoder is not None:
            return self._decoder.batch
        return -1 if self._state is None else len(self._state.lengths)

    @outside_compiled_graphs
    def absorb(self, model: LM, rows: Rows, columns: int) -> tuple[Tensor, Tensor | None]:
        """Absorbs tokens; returns what the head reads at each, `[batch, longest, dim]`, and what it read before them.

        Args:
            model: the model whose state this is.
            rows: the tokens.
            columns: length of the batch that the rows are from, with its padding.
        """
        state, before = self._held(model, len(rows.tokens)), self.features
        if rows.has_empty_row and before is None and self._columns:
            raise ValueError("a row has no token in this call, and its last logits are not kept; give it a token")
        features, self._state = model.continued(rows.tokens, state, rows.lengths)
        self._columns += columns
        self._is_beam_search &= columns == 1
        if columns:
            self.features = rows.placed(features, before, slice(-1, None))[:, 0]
        return features, before

    def can_step(self, tokens: Tensor) -> bool:
        """Whether `step` takes these tokens: one of each row, after others, and no gradient is wanted."""
        one_each = tokens.shape[1] == 1 and len(tokens) > 0 and self._columns > 0
        return one_each and not torch.is_grad_enabled() and not self._is_beam_search

    @outside_compiled_graphs
    def step(self, model: LM, tokens: Tensor) -> Tensor:
        """Absorbs one token of every row, `[batch, 1]`; returns the logits, `[batch, 1, vocab]`."""
        if self._decoder is None or self._decoder.model is not model:
            self._decoder = Decoder(model, self._held(model, len(tokens)))
            self._state = None
        self._refuse_other_batch(len(tokens))
        logits = self._decoder.step(tokens[:, 0])
        self._columns += 1
        self.features = None
        return logits[:, None].clone()  # the next step overwrites it

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of columns absorbed so far, with their padding."""
        del layer_idx
        return self._columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The length and the offset of a mask for further tokens."""
        del layer_idx
        return self._columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no longest sequence."""
        del layer_idx
        return -1

    get_max_cache_shape = get_max_length
    """As transformers called it before."""

    def reset(self) -> None:
        """Forgets all tokens."""
        self._state = self._decoder = self.features = None
        self._columns, self._is_beam_search = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps the given rows, in the given order, for beam search."""
        self._select(beam_idx)
        self._is_beam_search = True

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the given rows, in the given order."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row so many times."""
        self._select(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuses to take tokens back: their merges cannot be undone."""
        if tokens_to_remove:
            self._refuse_crop(tokens_to_remove)

    @property
    def is_croppable(self) -> bool:
        """False: see `crop`."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether there is a state."""
        return self.batch_size >= 0

    def detach(self) -> None:
        """Cuts the state from the graph, for truncated back-propagation through time."""
        self._state = None if self._state is None else self._state.detach()
        self.features = None if self.features is None else self.features.detach()

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.blocks)

    def __repr__(self) -> str:
        return f"LogDepthCache(batch_size={self.batch_size}, columns={self._columns}, nbytes={self.nbytes})"

    def __copy__(self) -> Self:
        other = type(self)()
        other.__dict__.update({**vars(self), "_state": self.state, "_decoder": None})
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = other = copy.copy(self)
        return other

    def _held(self, model: LM, batch: int) -> LMState:
        """The state to continue, out of the decoder that may hold it."""
        if self._decoder is not None:
            self._state, self._decoder = self._decoder.state(), None
        if self._state is None:
            self._state = model.init_state(batch)
        self._refuse_other_batch(batch)
        return self._state

    def _select(self, rows: Tensor) -> None:
        state = self.state
        self._state, self._decoder = None if state is None else state.select(rows), None
        if self.features is not None:
            self.features = self.features.index_select(0, rows.to(self.features.device))

    def _refuse_other_batch(self, batch: int) -> None:
        if self.batch_size != batch:
            raise ValueError(f"tokens have {batch} rows, but the cache has {self.batch_size}")

    def _refuse_crop(self, tokens_to_remove: int) -> NoReturn:
        raise ValueError(
            f"a LogDepthCache cannot take back {abs(tokens_to_remove)} tokens, because their merges cannot be undone; "
            "keep copy.deepcopy(cache) of the state before them, which copies no memory"
        )
