"""A Transformer that decodes with a static cache of keys and values, as fast as we can make it: the rival in decoding.

The cache has exactly as many places as the context, and a new token takes the oldest's. So every step reads the whole
cache, as a step at that context does, and needs neither a mask nor new shapes: attention can split the cache among the
processors, and the whole step is one CUDA graph. What is in the cache at first is random: only the time is of use.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.speed.baselines import after_attention, embedded, layers_of
from logdepth.models import LM
from logdepth.ops.attention import sinusoids


class CachedTransformer:
    """Tokens `[batch]` to the likeliest next ones; keys and values of `absorbed` tokens a row lie in the cache."""

    def __init__(self, model: LM, batch: int, absorbed: int) -> None:
        weight, self.layers = model.embedding.weight, layers_of(model)
        self.model = model
        heads = self.layers[0][0].config.heads
        shape = (batch, heads, absorbed, model.config.dim // heads)
        self.caches = [
            tuple(torch.randn(shape, device=weight.device, dtype=weight.dtype) for _ in range(2)) for _ in self.layers
        ]
        self.absorbed = absorbed
        self.position = torch.full((1,), absorbed, device=weight.device)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for pair in self.caches for one in pair)

    def positions(self) -> Tensor | None:
        """What is added to the embedding of the next tokens, in its dtype."""
        if self.model.config.positions != "sinusoidal":
            return None
        return sinusoids(self.position, self.model.config.dim).to(self.model.embedding.weight.dtype)

    def step(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens).argmax(-1)

    def logits(self, tokens: Tensor) -> Tensor:
        """`[batch, vocab]`; the cache and the position go on by one token."""
        model = self.model
        features = embedded(model, tokens[:, None], self.positions())
        place = self.position % self.absorbed
        for (attention, mlp), (keys, values) in zip(self.layers, self.caches, strict=True):
            query, key, value = attention.project(features)
            keys[:, :, place] = key
            values[:, :, place] = value
            attended = F.scaled_dot_product_attention(query, keys, values)
            features = after_attention(attention, mlp, features, attended)
        self.position.add_(1)
        assert model.norm is not None
        return model.logits(model.norm(features))[:, 0]
