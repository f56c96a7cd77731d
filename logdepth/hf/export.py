"""A run as a folder for Hugging Face, and back. Weights stay the same, bit by bit."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from logdepth.atomic import new_folder, read_json, write_json, write_text
from logdepth.config import from_dict, to_dict
from logdepth.data import CORPORA, Prepared, Tokenizer
from logdepth.data.locate import refuse_unprintable
from logdepth.errors import UserError
from logdepth.hf.configuration import LogDepthConfig
from logdepth.hf.model_card import model_card
from logdepth.hf.modeling import LogDepthForCausalLM
from logdepth.hf.remote_code import AUTO_MAP, FILE, remote_code
from logdepth.hf.tokenizer import fast_tokenizer
from logdepth.models import LM
from logdepth.runs import RunConfig, RunFolder, Weights
from logdepth.runs.folder import RESTORE
from logdepth.runs.tensors import VALUES, read_record

TOKENIZER = "tokenizer.model"
TIED_HEAD = "model.head.weight"
PREFIX = "model."


def export_run(run: Path, folder: Path, weights: Weights = "best") -> None:
    """Writes the model of a run as a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        run: the folder of a run.
        folder: the folder to write, which must not exist.
        weights: those with the lowest validation loss ("best"), or those of the last checkpoint ("last").
    """
    _refuse_existing(folder)
    source = RunFolder(run)
    loaded = source.load(weights)
    separated = CORPORA[loaded.config.data.corpus].separated
    end = loaded.tokenizer.end_of_document
    tokens: dict[str, Any] = {"pad_token_id": end} | ({"bos_token_id": end, "eos_token_id": end} if separated else {})
    config = LogDepthConfig(
        vocab_size=loaded.tokenizer.vocab_size,
        model=loaded.config.model,
        run={
            "config": to_dict(_without_paths(loaded.config)),
            "store": source.store_key(),
            "weights": weights,
            "values": read_record(source.weights(weights), RESTORE).get(VALUES),
            "step": loaded.step,
        },
        **tokens,
    )
    assert isinstance(loaded.model, LM)
    model = _wrapped(config, loaded.model)
    model.generation_config = GenerationConfig(**tokens)
    with new_folder(folder) as partial:
        _quietly(model.save_pretrained, partial)
        fast_tokenizer(loaded.tokenizer, separated=separated).save_pretrained(partial)
        for file in partial.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors writes files that only their owner can read
        write_text(partial / FILE, remote_code())
        write_json(partial / "config.json", read_json(partial / "config.json") | {"auto_map": AUTO_MAP})
        shutil.copyfile(run / TOKENIZER, partial / TOKENIZER)
        write_text(partial / "README.md", model_card(source, loaded, weights, separated=separated))


def import_run(folder: Path, run: Path) -> None:
    """Writes a folder that `export_run` wrote as a run again, also after its weights were trained further.

    The run has the weights under the name `best`. It has no checkpoint and no metrics, so it cannot be resumed.

    Args:
        folder: the folder of the model.
        run: the folder of the run to write, which must not exist.
    """
    _refuse_existing(run)
    file = folder / "config.json"
    saved = read_json(file)
    record = saved.get("run") if isinstance(saved, dict) else None
    if not isinstance(record, dict) or not {"config", "store", "step"} <= record.keys():
        raise UserError(f"{file} does not say from which run it is; give a folder that `logdepth export` wrote")
    config = from_dict(RunConfig, record["config"], f"{file}: run.config")
    tokenizer = Tokenizer.load(folder / TOKENIZER, remedy="copy it from the folder that was exported")
    model = _loaded(folder)
    if to_dict(config)["model"] != model.config.model or model.config.vocab_size != tokenizer.vocab_size:
        raise UserError(f"{file}: the model is not that of the run any more; a run needs the same model and vocabulary")
    prepared = Prepared(str(record["store"]), folder, tokenizer, {}, [], None)
    with new_folder(run) as partial:
        written = RunFolder(partial)
        written.create(config, prepared, torch.device("cpu"))
        values = written.save_weights("best", _library_weights(model), int(record["step"]))
    if values != record.get("values"):
        print(f"the weights in {folder} are not those that were exported: they were trained further", file=sys.stderr)


def _wrapped(config: LogDepthConfig, model: LM) -> LogDepthForCausalLM:
    """The Hugging Face model with the weights of a model of the library."""
    wrapped: LogDepthForCausalLM = LogDepthForCausalLM(config)
    weights = model.state_dict()
    if model.head is None:
        weights["head.weight"] = weights["embedding.weight"]
    wrapped.model.load_state_dict(weights)
    wrapped.eval()
    return wrapped


def _loaded(folder: Path) -> LogDepthForCausalLM:
    """The model in a folder; an error of one line where it cannot be loaded."""
    try:
        model: LogDepthForCausalLM = _quietly(LogDepthForCausalLM.from_pretrained, folder, local_files_only=True)
    except UserError:
        raise
    except Exception as error:  # of many kinds, by the part of transformers or safetensors that finds it
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{folder} cannot be loaded ({reason}); restore it from a copy") from None
    return model


def _library_weights(model: LogDepthForCausalLM) -> dict[str, Tensor]:
    """Weights by their names in the library, in float32 as those of all runs."""
    tied = {TIED_HEAD} if model.config.tie_word_embeddings else set()
    names = model.state_dict().keys() - tied
    return {name.removeprefix(PREFIX): model.state_dict()[name].float() for name in sorted(names)}


def _without_paths(config: RunConfig) -> RunConfig:
    """The config without the paths of this machine, which are nobody else's business."""
    data = dataclasses.replace(config.data, paths=())
    return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, init_from=None))


def _refuse_existing(folder: Path) -> None:
    refuse_unprintable(folder, "choose another folder")  # safetensors writes no such file
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists already; choose another folder")


def _quietly(function: Any, *arguments: Any, **settings: Any) -> Any:
    """Calls a function of transformers without its progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return function(*arguments, **settings)
    finally:
        if shown:
            logging.enable_progress_bar()
