"""Starting and resuming a run: first all checks, then the work."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from logdepth.blocks import BlockConfig
from logdepth.config import flattened, to_dict
from logdepth.data import CORPORA, Prepared, is_prepared, open_prepared, prepare
from logdepth.errors import UserError
from logdepth.models import LMConfig, ScanLMConfig, TransformerConfig, unallocated
from logdepth.parallel import Ranks, joined, under_torchrun
from logdepth.runs import MACHINE_FIELDS, RunConfig, RunFolder, device_named
from logdepth.runs.environment import differences, environment
from logdepth.runs.folder import quoted
from logdepth.training.checkpoint import TrainState
from logdepth.training.loop import Trainer
from logdepth.training.trackers import check_trackers
from logdepth.training.watch import Watch

EXTENDABLE = MACHINE_FIELDS | {"train.max_steps", "train.epochs", "train.patience"}
"""Fields that may change when a run is resumed: how long it trains, and where."""


def train(config: RunConfig, out: Path, data_dir: Path | None = None, watch: Watch | None = None) -> TrainState:
    """Trains a new run in the folder `out`. Errors that can be found in advance come before anything is written.

    Under torchrun, every process calls this, and a run that is there is resumed: torchrun repeats its command.
    """
    ranks, folder = joined(), RunFolder(out)
    if under_torchrun() and ranks.from_first(lambda: folder.exists):
        return resume(out, data_dir, watch, config)
    if ranks.is_first:
        folder.refuse_if_taken()
    config = with_absolute_paths(config)
    device = ranks.device(config.train.device)
    prepared = ranks.machines_first(lambda: checked_and_prepared(config, data_dir))
    use_threads(config)
    trainer = Trainer(folder, config, prepared, device, watch, ranks)
    with _locked(folder, ranks):
        if ranks.is_first:
            folder.create(config, prepared, device, ranks.world_size)
        return trainer.run()


def _locked(folder: RunFolder, ranks: Ranks) -> AbstractContextManager[None]:
    """Keeps the processes of other runs from training in this folder."""
    return folder.locked() if ranks.is_first else nullcontext()


def resume(
    out: Path, data_dir: Path | None = None, watch: Watch | None = None, config: RunConfig | None = None
) -> TrainState:
    """Resumes a run from its last checkpoint, with the config saved in its folder.

    With another config, which may differ in EXTENDABLE fields only, the run continues with that one.
    """
    ranks, folder = joined(), RunFolder(out)
    saved = folder.config()
    config = saved if config is None else with_absolute_paths(config)
    changes = _extensions(saved, config, out)
    check_trackers(config)
    device = ranks.device(config.train.device)
    _refuse_odd_blocks(config.model, device)
    prepared = ranks.machines_first(lambda: prepared_for(folder, data_dir, config))
    use_threads(config)
    with _locked(folder, ranks):
        changed = differences(folder.environment(), environment(device, ranks.world_size))
        if changed:
            what = ", ".join(changed)
            print(f"the environment has changed ({what}): the run may not resume bit-for-bit", file=sys.stderr)
        folder.refuse_odd_files()
        trainer = Trainer(folder, config, prepared, device, watch, ranks)
        if ranks.is_first:
            trainer.checkpoints.rewind_metrics(trainer.state)  # refuses damaged ones, before the config changes
        if changes:
            if ranks.is_first:
                folder.change_config(config)
            print(f"{out} continues with {', '.join(changes)}", file=sys.stderr)
        return trainer.run()


def _extensions(saved: RunConfig, config: RunConfig, out: Path) -> list[str]:
    """The changes of a resumed run's config, in words; an error if a field must not change."""
    before, after = flattened(to_dict(saved)), flattened(to_dict(config))
    names = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    for name in names:
        if name not in EXTENDABLE:
            raise UserError(
                f"{out} was trained with {name} {before.get(name)!r}; a resumed run cannot change it to "
                f"{after.get(name)!r}; to start a new run from its weights, use --train.init-from {quoted(out)}"
            )
    return [f"{name} {after.get(name)!r} (before: {before.get(name)!r})" for name in names]


def checked_and_prepared(config: RunConfig, data_dir: Path | None = None) -> Prepared:
    """The tokens that a new run would train on, after all checks of its config."""
    device = device_named(config.train.device)
    check_trackers(config)
    if config.train.reset_at_documents and not CORPORA[config.data.corpus].separated:
        raise UserError(f"corpus '{config.data.corpus}' is one stream; --train.reset-at-documents needs documents")
    _refuse_odd_blocks(config.model, device)
    first = config.train.init_from
    return prepare(config.data, data_dir, None if first is None else RunFolder(first).tokenizer())


def _refuse_odd_blocks(model: Any, device: torch.device) -> None:
    """Raise a UserError if a block cannot be built for the model's width, or cannot be trained on the device.

    The heads of an attention block may not divide the width, for example.
    """
    lm = model.as_lm() if isinstance(model, ScanLMConfig | TransformerConfig) else model
    if not isinstance(lm, LMConfig):
        return
    try:
        for block in dict.fromkeys(lm.blocks):
            with unallocated():
                built = cast(BlockConfig, block).build(lm.dim)
            built.refuse_training_on(device)
    except ValueError as error:
        raise UserError(f"model{'.blocks' if lm is model else ''}: {error}") from None


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The config with absolute paths: a run may be resumed from another working directory."""
    # Path.resolve would raise an error for a loop of links, which is refused where the text is read.
    data = replace(config.data, paths=tuple(Path(os.path.realpath(path)) for path in config.data.paths))
    first = config.train.init_from
    init_from = None if first is None else Path(os.path.realpath(first))
    return replace(config, data=data, train=replace(config.train, init_from=init_from))


def use_threads(config: RunConfig) -> None:
    """Sets the number of CPU threads, if the config does."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)


def prepared_for(folder: RunFolder, data_dir: Path | None = None, config: RunConfig | None = None) -> Prepared:
    """The token store of a run: from the cache, or prepared again from the same text, which `config` may locate."""
    key, tokenizer, saved = folder.store_key(), folder.tokenizer(), with_absolute_paths(folder.config())
    data = (config or saved).data
    if data.paths == saved.data.paths and is_prepared(key):
        prepared = open_prepared(key)
        if prepared.tokenizer.hash != tokenizer.hash:
            raise UserError(
                f"{folder.path / 'tokenizer.model'} is not the tokenizer that the run was trained with; restore it "
                "from a copy"
            )
        return prepared
    prepared = prepare(data, data_dir, tokenizer)
    if prepared.key != key:
        raise UserError(
            f"corpus '{data.corpus}' is not the text that {folder.path} was trained on; restore the old text"
        )
    return prepared
