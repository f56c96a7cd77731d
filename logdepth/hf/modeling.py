"""LogDepthForCausalLM: the library's LM as a Hugging Face model. It has no forward pass of its own."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from logdepth.blocks import Block
from logdepth.hf.cache import LogDepthCache
from logdepth.hf.configuration import LogDepthConfig
from logdepth.hf.rows import Rows, rows_of
from logdepth.models import LM
from logdepth.ops.cross_entropy import IGNORED

IGNORED_ARGUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
"""What collators of packed documents give in addition to position_ids, which say the same."""


class LogDepthForCausalLM(PreTrainedModel, GenerationMixin):
    """Any language model of the library. `model` is the LM itself, and its weights keep their names below `model`."""

    config_class = LogDepthConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012  (as the base class has it)
    _no_split_modules = ["LM"]  # noqa: RUF012  (device_map="auto" keeps a model on one device)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True

    def __init__(self, config: LogDepthConfig) -> None:
        super().__init__(config)
        self.model = LM(config.vocab_size, config.lm_config())
        if self.model.head is None:
            # Hugging Face looks for the head as a module. It has no weight of its own.
            head = nn.Linear(self.model.config.dim, config.vocab_size, bias=False, device="meta")
            head.weight = self.model.embedding.weight
            self.model.head = head
        if not self.model.embedding.weight.is_meta:
            for module in self.model.modules():  # an LM draws its first weights when it is built
                setattr(module, "_is_hf_initialized", True)  # noqa: B010
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: LogDepthCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **arguments: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next token, the loss if there are labels, and the state after the tokens.

        Masked tokens are skipped, wherever they are: each row gets the logits that it would get without them. At a
        masked token the logits are those of the last token before it, or zeros if there is none.

        Args:
            input_ids: `[batch, length]`.
            attention_mask: `[batch, length]`, or with a cache also of all columns before; zeros mark padding.
            past_key_values: the state to continue, which this call changes.
            labels: `[batch, length]`, the tokens themselves, or -100 where the prediction of a token does not count.
            use_cache: whether the state is returned; by default as the config says in eval mode without labels.
            logits_to_keep: how many of the last columns get logits, or which columns; 0: all.
            return_dict: False: a tuple is returned.
            arguments: `position_ids` where documents are packed into one row, each starting at 0;
                `num_items_in_batch`, by which the sum of losses is divided instead of their number.
        """
        total = arguments.pop("num_items_in_batch", None)
        bounds = _bounds_of(arguments.pop("position_ids", None), attention_mask)
        _refuse_unknown(arguments)
        if past_key_values is not None and not isinstance(past_key_values, LogDepthCache):
            raise TypeError(f"past_key_values must be a LogDepthCache; got {type(past_key_values).__name__}")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None and bounds is None
        cache = past_key_values
        if cache is None and use_cache:
            cache = LogDepthCache()
        if cache is not None and bounds is not None:
            raise ValueError("packed documents have no state to continue: give position_ids without a cache")
        columns = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep or None, None)

        rows = rows_of(input_ids, attention_mask)
        one_each = rows.lengths is None and cache is not None and cache.can_step(input_ids)
        loss = None
        if cache is not None and one_each and labels is None and not self.training:
            logits = cache.step(self.model, input_ids)[:, columns]
        else:
            found, before = self._read(rows, cache, bounds, input_ids.shape[1])
            if labels is not None:
                loss = self._loss(found, rows.taken(labels, IGNORED), bounds, total)
            logits = self.model.logits(rows.placed(found, before, columns))
        output = CausalLMOutputWithPast(loss=cast(Any, loss), logits=cast(Any, logits), past_key_values=cache)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding, as a change of the vocabulary does."""
        self.model.embedding = cast(nn.Embedding, value)
        self.model.vocab_size = self.model.embedding.num_embeddings

    def get_output_embeddings(self) -> nn.Module | None:
        """The head."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the head."""
        self.model.head = cast(nn.Linear, new_embeddings)

    def _read(
        self, rows: Rows, cache: LogDepthCache | None, bounds: list[int] | None, columns: int
    ) -> tuple[Tensor, Tensor | None]:
        """What the head reads at each token of the rows, and what it read before them."""
        if cache is not None:
            return cache.absorb(self.model, rows, columns)
        if bounds is not None:
            return self.model.features(rows.tokens[0], cu_seqlens=bounds)[None], None
        return self.model.features(rows.tokens, lengths=rows.lengths), None

    def _loss(self, found: Tensor, labels: Tensor, bounds: list[int] | None, total: Any) -> Tensor:
        """The loss of the library: each token predicts the next one of its row, or of its document."""
        if bounds is not None:
            labels = labels.clone()
            labels[:, bounds[:-1]] = IGNORED
        targets = labels[:, 1:]
        loss = self.model.features_loss(found[:, :-1], targets)
        if total is None:
            return loss
        count = (targets != IGNORED).sum()
        averaged: Tensor = loss.where(count > 0, 0.0) * (count / total)
        return averaged

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """First values for what a checkpoint has not: buffers, and weights that are missing in it."""
        if isinstance(module, Block):
            module.reset_buffers()
        missing = [
            name
            for name, one in module.named_parameters(recurse=False)
            if not getattr(one, "_is_hf_initialized", False)
        ]
        path = next((name for name, one in self.model.named_modules() if one is module), None)
        if missing and path is None:  # rows for new tokens, which are made outside the model
            super()._init_weights(module)
        elif missing and path is not None:
            drawn = LM(self.config.vocab_size, self.config.lm_config()).get_submodule(path)
            for name in missing:
                getattr(module, name).copy_(getattr(drawn, name))

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = partial(checkpoint, use_reentrant=False),  # noqa: B008
        every_n_layers: int = 1,
    ) -> None:
        """Stores only the inputs of every n-th block for the backward pass, which computes these blocks again."""
        self.gradient_checkpointing = enable
        chosen = set(list(self.model.blocks)[::every_n_layers])
        self.model.call_block = partial(_called, gradient_checkpointing_func, chosen) if enable else None

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes the cache


def _called(stored: Callable[..., Any], chosen: set[Block], block: Block, *arguments: Any) -> Any:
    return stored(block, *arguments) if block in chosen else block(*arguments)


def _bounds_of(position_ids: Tensor | None, mask: Tensor | None) -> list[int] | None:
    """Where each packed document starts, and last the total; None where there is one document per row."""
    if position_ids is None:
        return None
    if len(position_ids) != 1 or mask is not None:
        raise ValueError(
            "position_ids are only for documents that are packed into one row, without attention_mask; otherwise "
            "positions follow from attention_mask"
        )
    starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
    if not starts or starts[0] != 0:
        raise ValueError("position_ids must be 0 at the first token of each packed document")
    return [*starts, position_ids.shape[1]]


def _refuse_unknown(arguments: dict[str, Any]) -> None:
    """Raises an error for arguments that would be ignored."""
    for name, value in arguments.items():
        if name in IGNORED_ARGUMENTS or value is None or value is False:
            continue
        if name in ("output_attentions", "output_hidden_states"):
            raise ValueError(f"LogDepthForCausalLM does not return what {name} asks for; hooks on its blocks can")
        raise TypeError(f"LogDepthForCausalLM does not take the argument {name}")
