"""The definition of the keyed memory, in slow and simple code against which all fast code is tested.

It processes one head of one sequence, token by token, without batching and without a state. Keys k have width d_k,
values v width d_v. β is the write strength and α = e^{log_decay} the decay of a token:

    token(t)   = (M, S) = (α_t (I − β_t k_t k_tᵀ), β_t k_t v_tᵀ)              what a token does to a memory: S ← M S + S
    left ⊙ right = (M_R M_L, M_R S_L + S_R)                                   first left, then right; associative
    folded:          o_t = q_tᵀ S of token(0) ⊙ … ⊙ token(t)                  the gated delta rule
    level-weighted:  o_t = q_tᵀ S_own + Σ_l λ_tl q_tᵀ M_own … S_l             see `level_weighted`
    gated:           left ⊙ right = (M_R diag(g) M_L, M_R diag(g) S_L + S_R)  between blocks, with a gate for each merge
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """What some successive tokens do to the memory before them: S becomes M S + `written`."""

    transition: Tensor
    """M, `[key_width, key_width]`."""
    written: Tensor
    """S, `[key_width, value_width]`."""


def token(key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor) -> Memory:
    """Decays the memory, erases what is stored at the key, and writes the value there."""
    identity = torch.eye(len(key), dtype=key.dtype, device=key.device)
    transition = log_decay.exp() * (identity - strength * torch.outer(key, key))
    return Memory(transition, strength * torch.outer(key, value))


def merge(left: Memory, right: Memory, gate: Tensor | None = None) -> Memory:
    """What first `left` and then `right` do; between them, key channels are multiplied by the gate `[key_width]`."""
    kept = right.transition if gate is None else right.transition @ torch.diag(gate)
    return Memory(kept @ left.transition, kept @ left.written + right.written)


def tokens_of(keys: Tensor, values: Tensor, log_decay: Tensor, strength: Tensor) -> list[Memory]:
    """What each token of a sequence does: from `[length, key_width]`, `[length, value_width]`, and `[length]` twice."""
    return [token(*one) for one in zip(keys, values, log_decay, strength, strict=True)]


def folded(queries: Tensor, tokens: list[Memory], before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs `[length, value_width]` of the gated delta rule, and the memory S after the last token.

    `before` is the memory S before the first token; by default it is empty.
    """
    written = torch.zeros_like(tokens[0].written) if before is None else before
    outputs = []
    for query, one in zip(queries, tokens, strict=True):
        written = one.transition @ written + one.written
        outputs.append(query @ written)
    return torch.stack(outputs), written


def level_weighted(
    queries: Tensor,
    tokens: list[Memory],
    weights: Tensor,
    chunk: int,
    gate: Callable[[int, int], Tensor] | None = None,
) -> Tensor:
    """Outputs `[length, value_width]`, read block by block with a weight for each level.

    Chunks of `chunk` tokens are the leaves of the scan's tree. Token i reads its own chunk up to itself with weight 1,
    then the blocks of the binary decomposition of ⌊i / chunk⌋ chunks, from the latest to the earliest. Past each block
    the query becomes q M, so with weights of 1 this is `folded`.

    `weights` are λ, `[length, levels]`. `gate(level, number)` is that of the merge which makes block `number` of a
    level; without it, nothing is gated.
    """
    built: dict[tuple[int, int], Memory] = {}

    def block(level: int, number: int) -> Memory:
        if (level, number) not in built:
            if level == 0:
                made = product(tokens[number * chunk : (number + 1) * chunk])
            else:
                halves = block(level - 1, 2 * number), block(level - 1, 2 * number + 1)
                made = merge(*halves, None if gate is None else gate(level, number))
            built[level, number] = made
        return built[level, number]

    outputs = []
    for position, query in enumerate(queries):
        num_chunks = position // chunk
        own = product(tokens[num_chunks * chunk : position + 1])
        output, query = query @ own.written, query @ own.transition
        for level in range(num_chunks.bit_length()):
            if num_chunks >> level & 1:
                earlier = block(level, (num_chunks >> level) - 1)
                output = output + weights[position, level] * (query @ earlier.written)
                query = query @ earlier.transition
        outputs.append(output)
    return torch.stack(outputs)


def product(tokens: list[Memory]) -> Memory:
    """What successive tokens do together."""
    result = tokens[0]
    for one in tokens[1:]:
        result = merge(result, one)
    return result
