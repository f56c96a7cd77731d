"""Starting a run and going on with one: checks first, then work."""

import sys
from pathlib import Path

from logdepth.data import Prepared, is_prepared, open_prepared, prepare
from logdepth.errors import UserError
from logdepth.runs import RunConfig, RunFolder, device_named
from logdepth.runs.environment import differences, environment
from logdepth.train.loop import Standing, Trainer


def train(config: RunConfig, out: Path, data_dir: Path | None = None) -> Standing:
    """A new run in the folder `out`; nothing is written there before everything is known to fit."""
    folder = RunFolder(out)
    folder.refuse_if_taken()
    device = device_named(config.train.device)
    prepared = prepare(config.data, data_dir)
    trainer = Trainer(folder, config, prepared, device)
    with folder.locked():
        folder.create(config, prepared, device)
        return trainer.run()


def resume(out: Path, data_dir: Path | None = None) -> Standing:
    """Goes on with a run from its last checkpoint, with the config that is saved with it."""
    folder = RunFolder(out)
    config = folder.config()
    device = device_named(config.train.device)
    prepared = prepared_for(folder, data_dir)
    with folder.locked():
        changed = differences(folder.environment(), environment(device))
        if changed:
            print(f"going on where the run began otherwise ({', '.join(changed)}): not bit for bit", file=sys.stderr)
        return Trainer(folder, config, prepared, device).run()


def prepared_for(folder: RunFolder, data_dir: Path | None = None) -> Prepared:
    """The token store that a run was made with: from the cache, or from the same text prepared again."""
    key = folder.store_key()
    if is_prepared(key):
        return open_prepared(key)
    prepared = prepare(folder.config().data, data_dir)
    if prepared.key != key:
        raise UserError(
            f"the corpus is not the one that {folder.path} was trained on: that was {key}, this is {prepared.key}"
        )
    return prepared
