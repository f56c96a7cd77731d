"""Starting and resuming a run: first all checks, then the work."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from logdepth.data import CORPORA, Prepared, is_prepared, open_prepared, prepare
from logdepth.errors import UserError
from logdepth.runs import RunConfig, RunFolder, device_named
from logdepth.runs.environment import differences, environment
from logdepth.training.checkpoint import TrainState
from logdepth.training.loop import Trainer
from logdepth.training.trackers import check_trackers
from logdepth.training.watch import Watch


def train(config: RunConfig, out: Path, data_dir: Path | None = None, watch: Watch | None = None) -> TrainState:
    """Trains a new run in the folder `out`. Errors that can be found in advance come before anything is written."""
    folder = RunFolder(out)
    folder.refuse_if_taken()
    config = with_absolute_paths(config)
    prepared = checked_and_prepared(config, data_dir)
    use_threads(config)
    device = device_named(config.train.device)
    trainer = Trainer(folder, config, prepared, device, watch)
    with folder.locked():
        folder.create(config, prepared, device)
        return trainer.run()


def resume(out: Path, data_dir: Path | None = None, watch: Watch | None = None) -> TrainState:
    """Resumes a run from its last checkpoint, with the config saved in its folder."""
    folder = RunFolder(out)
    config = folder.config()
    check_trackers(config)
    device = device_named(config.train.device)
    prepared = prepared_for(folder, data_dir)
    use_threads(config)
    with folder.locked():
        changed = differences(folder.environment(), environment(device))
        if changed:
            what = ", ".join(changed)
            print(f"the environment has changed ({what}): the run may not resume bit-for-bit", file=sys.stderr)
        return Trainer(folder, config, prepared, device, watch).run()


def checked_and_prepared(config: RunConfig, data_dir: Path | None = None) -> Prepared:
    """The tokens that a new run would train on, after all checks of its config."""
    device_named(config.train.device)
    check_trackers(config)
    if config.train.reset_at_documents and not CORPORA[config.data.corpus].separated:
        raise UserError(f"corpus '{config.data.corpus}' is one stream; --train.reset-at-documents needs documents")
    first = config.train.init_from
    return prepare(config.data, data_dir, None if first is None else RunFolder(first).tokenizer())


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The config with absolute paths: a run may be resumed from another working directory."""
    data = replace(config.data, paths=tuple(path.resolve() for path in config.data.paths))
    first = config.train.init_from
    return replace(config, data=data, train=replace(config.train, init_from=first and first.resolve()))


def use_threads(config: RunConfig) -> None:
    """Sets the number of CPU threads, if the config does."""
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)


def prepared_for(folder: RunFolder, data_dir: Path | None = None) -> Prepared:
    """The token store of a run: from the cache, or prepared again from the same text."""
    key = folder.store_key()
    if is_prepared(key):
        return open_prepared(key)
    data = folder.config().data
    prepared = prepare(data, data_dir, folder.tokenizer())
    if prepared.key != key:
        raise UserError(
            f"corpus '{data.corpus}' is not the text that {folder.path} was trained on; restore the old text"
        )
    return prepared
