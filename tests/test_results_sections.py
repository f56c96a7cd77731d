"""The sections of the results pages, from made-up files."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from logdepth.associativity import Associativity
from logdepth.data import TokenizerConfig
from logdepth.errors import UserError
from logdepth.recipes import parameters_of
from logdepth.results import OtherText, write_result
from results_page.associativity import associativity
from results_page.headline import caveats, headline
from results_page.kept import STUDIES, read_kept
from results_page.markdown import NOTHING
from results_page.origins import associativity_origins, origins, sweep_origins
from results_page.studies import others, study_section
from results_page.sweeps import sweeps
from results_page.tasks import task_choice, task_published
from tests.kept_results import a_run, add_associativity, add_study, add_sweep, add_tasks, an_associativity
from tests.tiny_study import made_up_run, made_up_times, positions_of


def test_the_headline(tmp_path: Path) -> None:
    add_study(tmp_path / "ptb", ar_grc=10.0)
    add_study(tmp_path / "wikitext2-tuned", seeds=1, models=("ar-grc",))
    text = headline(read_kept(tmp_path))
    tuned, ours, next_one = text.splitlines()[2:5]
    assert tuned == "| WikiText-2, tuned | AR-GRC | 20.00 | 80.00 | 1.0000 | 0.500 | 1 | 16.6M | – |"
    numbers = "10.10 ± 0.10 | 40.40 ± 0.40 | 0.5050 ± 0.0050 | 0.500 ± 0.000"
    assert ours == f"| PTB | AR-GRC | {numbers} | 3 | 3.5M | 14.34 |"
    assert next_one.startswith("|  | AR-MLP-LDRU | 21.10 ± 0.10 |")
    assert "1.316 or 1.202" in caveats(read_kept(tmp_path))


def test_the_papers_number_is_shown_for_both_possible_vocabularies(tmp_path: Path) -> None:
    run = a_run("ptb-1k", "ar-grc", 0)
    for name, size in (("ptb", 1_500), ("ptb-1k", 1_000), ("ptb-2k", 2_000)):
        data = dataclasses.replace(run.config.data, tokenizer=TokenizerConfig(vocab_size=size))
        config = dataclasses.replace(run.config, data=data)
        changed = dataclasses.replace(run, config=config, parameters=parameters_of(config))
        write_result(tmp_path / name / "a.json", changed)
    lines = headline(read_kept(tmp_path)).splitlines()[2:5]
    ends = {line.split(" | ")[0]: line.split(" | ")[-2:] for line in lines}
    assert ends == {
        "| PTB": ["3.5M", "14.34 |"],
        "| PTB, 2k": ["3.6M", "– |"],
        "| PTB, 1k": ["3.4M", "14.34 |"],
    }


def test_a_shared_caveat_is_listed_once(tmp_path: Path) -> None:
    for study in STUDIES:
        add_study(tmp_path / study, seeds=1)
    text = caveats(read_kept(tmp_path))
    assert text.count("\n- ") == 2
    assert "- *PTB; PTB, 1k; PTB, tuned; PTB, tuned, deeper.* Test split" in text


def test_what_was_not_measured_has_no_number(tmp_path: Path) -> None:
    run = a_run("ptb", "ar-grc", 0)
    some = dataclasses.replace(run, test=run.test[3:5], positions=positions_of(run.test[4]))
    write_result(tmp_path / "ptb" / "a.json", some)
    row = headline(read_kept(tmp_path)).splitlines()[2]
    assert " | 1.0000 | – | 1 | " in row


def test_a_study_shows_some_lengths_and_says_so(tmp_path: Path) -> None:
    add_study(tmp_path / "ptb")
    text = study_section(read_kept(tmp_path), "ptb")
    lengths = re.findall(r"^\| ([\d,]+) \|", text, flags=re.MULTILINE)
    assert lengths == ["32", "160", "512", "1,056", "2,080", "2,976", "32", "160", "544", "1,056", "2,080", "2,976"]
    assert "The table shows 6 of 25 context lengths" in text
    assert "The table shows 6 of 24 context lengths" in text


def test_a_study_shows_what_was_measured_on_other_text(tmp_path: Path) -> None:
    run = a_run("webmix", "ar-grc", 0)
    other = OtherText(name="pages", text=run.data.splits["test"], test=run.test[-1:])
    write_result(tmp_path / "webmix" / "a.json", dataclasses.replace(run, others=(other,)))
    text = study_section(read_kept(tmp_path), "webmix")
    assert f"| pages | AR-GRC | {run.test[-1].context:,} | {run.test[-1].token_perplexity:.2f} |" in text


def test_folders_of_other_names_are_shown_too(tmp_path: Path) -> None:
    for name in ("wikitext2-tuned-deep-3", "wikitext2-tuned-deep-2", "ptb-1k", "text-mine"):
        corpus = "ptb" if name == "text-mine" else name.split("-")[0]
        write_result(tmp_path / name / "a.json", a_run(corpus, "ar-grc", 0))
    kept = read_kept(tmp_path)
    assert list(kept.studies) == ["wikitext2-tuned-deep-2", "wikitext2-tuned-deep-3", "ptb-1k", "text-mine"]
    deep = study_section(kept, "wikitext2-tuned-deep")
    titles = [line for line in deep.splitlines() if line.startswith("## ")]
    assert titles == ["## WikiText-2, tuned, deeper, 2 layers", "## WikiText-2, tuned, deeper, 3 layers"]
    assert study_section(kept, "ptb") == study_section(kept, "wikitext2-tuned") == NOTHING
    assert "##" not in study_section(kept, "ptb-1k")
    assert others(kept).startswith("## text-mine\n**Test perplexity")
    assert "(`results/text-mine/`): runs: 1; " in others(kept)


def test_sweeps_of_a_study_are_columns_of_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "ptb-tuned"
    add_sweep(folder / "a.json", recipe="ptb-transformer-alibi", space={"dropout": [0.1, 0.2]}, best=None)
    add_sweep(folder / "b.json")
    text = sweeps(read_kept(tmp_path))
    assert "(figures/results-sweeps-ptb-tuned.svg)" in text
    assert "**PTB, tuned: sweeps**" in text
    assert "| field | searched | AR-GRC | Transformer (ALiBi) |" in text
    assert "| train.learning_rate | 0.0001 to 0.01, logarithmic | 0.001235 | – |" in text
    assert "| dropout | 0 to 0.4, in steps of 0.05 | 0.2 | – |" in text
    assert "| dropout | 0.1, 0.2 | – | – |" in text
    assert "| model.depth | 1, 2, – | – | – |" in text
    assert "| validation loss |  | 3.2500 | – |" in text
    assert "| trials |  | 1 complete, 1 pruned | 1 complete, 1 pruned |" in text
    assert "A trial spans 12 epochs unless that is searched." in text


@pytest.mark.parametrize(
    ("name", "changes"),
    [("z.json", {}), ("z.json", {"recipe": "pydocs-ar-gru", "config": {"train": {}, "data": {"corpus": "pydocs"}}})],
)
def test_a_study_has_one_corpus_and_one_sweep_a_model(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    add_sweep(tmp_path / "sweeps" / "ptb" / "a.json")
    add_sweep(tmp_path / "sweeps" / "ptb" / name, **changes)
    with pytest.raises(UserError, match=r"z\.json: a study has one corpus, and one sweep for each model"):
        read_kept(tmp_path)


def test_a_folder_without_sweeps_is_no_study(tmp_path: Path) -> None:
    (tmp_path / "sweeps" / "ptb").mkdir(parents=True)
    assert sweeps(read_kept(tmp_path)) == NOTHING


def test_associativity_is_read_as_it_was_written() -> None:
    found = an_associativity()
    saved = json.loads(json.dumps(found.as_dict()))
    again = Associativity.from_dict(saved, "file")
    assert again.as_dict() == found.as_dict()
    assert again.error_over_scan("left fold") == pytest.approx(found.error_over_scan("left fold"))
    with pytest.raises(UserError, match="file is not an output of `logdepth associativity` in version 1"):
        Associativity.from_dict(saved | {"version": 2}, "file")
    with pytest.raises(UserError, match=r"file is damaged or was edited \('nats'\)"):
        Associativity.from_dict(
            saved | {"trees": [{"tree": "scan"} | {name: 1 for name in saved["trees"][0] if name != "nats"}]}, "file"
        )


def test_a_table_of_associativity(tmp_path: Path) -> None:
    found = an_associativity()
    add_associativity(tmp_path / "associativity" / "wikitext2-ar-grc.json", found)
    text = associativity(read_kept(tmp_path))
    assert "| tokens per block | up: distance | up: influence | up: untrained distance | down: distance |" in text
    assert "| 2 | 0.250 ± 0.010 | 0.500 | 0.750 ± 0.071 | 0.250" in text
    over = f"{found.over_scan('left fold'):,.4f} ± {found.error_over_scan('left fold'):,.4f}"
    assert f"| left fold | {found.trees['left fold'].whole.token_perplexity:,.2f} | {over} |" in text


def test_one_law_has_no_name_and_several_layers_have_numbers(tmp_path: Path) -> None:
    found = an_associativity(("up",))
    deeper = [one._replace(layer=1, influence=0.75) for one in found.distances]
    found = dataclasses.replace(found, distances=[*found.distances, *deeper])
    add_associativity(tmp_path / "associativity" / "deep.json", found)
    text = associativity(read_kept(tmp_path))
    assert "| layer | tokens per block | distance | influence | untrained distance |" in text
    assert "| 1 | 2 | 0.250 ± 0.010 | 0.500 | 0.750 ± 0.071 |" in text
    assert "| 2 | 1 | 0.250 ± 0.010 | 0.750 | – |" in text
    assert "Laws:" not in text


def test_where_the_numbers_of_a_study_come_from(tmp_path: Path) -> None:
    run = made_up_run()
    for seed, at in ((0, "2030-01-01T10:00:00+00:00"), (7, "2030-01-03T10:00:00+00:00")):
        made = dataclasses.replace(run.made, at=at, training_seconds=3600.0)
        write_result(tmp_path / "ptb" / f"{seed}.json", dataclasses.replace(made_up_run(seed=seed), made=made))
    write_result(
        tmp_path / "ptb" / "t.json", dataclasses.replace(made_up_times("ar-grc"), made="logdepth reproduce ptb --seeds")
    )
    assert origins(read_kept(tmp_path), "ptb") == (
        "**PTB** (`results/ptb/`): runs: 2; seeds 0 7; 2 hours of training; 2030-01-01 to 2030-01-03; cpu; torch 2.\n\n"
        "    logdepth reproduce ptb\n    logdepth reproduce ptb --seeds"
    )
    assert origins(read_kept(tmp_path), "ptb-1k") == NOTHING


def test_where_sweeps_and_associativity_come_from(tmp_path: Path) -> None:
    assert sweep_origins(read_kept(tmp_path)) == associativity_origins(read_kept(tmp_path)) == NOTHING
    add_sweep(tmp_path / "sweeps" / "ptb-tuned" / "a.json")
    add_sweep(tmp_path / "sweeps" / "ptb-tuned" / "b.json", recipe="ptb-gru", command="logdepth sweep ptb-gru")
    add_associativity(tmp_path / "associativity" / "ptb-ar-grc.json", an_associativity())
    kept = read_kept(tmp_path)
    assert sweep_origins(kept).splitlines() == [
        "- `results/sweeps/ptb-tuned/ptb-ar-grc.json`: made before commands were recorded; "
        "`python experiments/run.py --list ptb-tuned` prints the planned command.",
        "- `results/sweeps/ptb-tuned/ptb-gru.json`: `logdepth sweep ptb-gru`.",
    ]
    assert associativity_origins(kept).startswith("- `results/associativity/ptb-ar-grc.json`: `")
    assert associativity_origins(kept).endswith("`. The weights of that run were not kept.")


def test_blocks_are_chosen_from_results(tmp_path: Path) -> None:
    """One that is best at each alone, and another that is better at the worse of both."""
    places = tmp_path / "tasks" / "groups", tmp_path / "tasks" / "recall"
    shares = {"grc": (1.0, 0.1), "memory": (0.2, 0.999), "grc-memory": (0.99, 0.98), "rope": (0.3, 0.5)}
    add_tasks(tmp_path / "tasks" / "groups-quick", "s5", {"alibi": 1.0, "rope": 1.0})
    assert task_choice(read_kept(tmp_path)) == (
        "The results do not say yet which block to choose: accuracies of several models on S₅ and MQAR are missing."
    )
    add_tasks(places[0], "s5", {solver: both[0] for solver, both in shares.items()}, seeds=3)
    add_tasks(places[0], "s3", {"grc": 1.0, "rope": 0.3}, seeds=3)
    assert "on MQAR are missing" in task_choice(read_kept(tmp_path))
    add_tasks(places[1], "mqar", {solver: both[1] for solver, both in shares.items()}, seeds=3)
    tracking, recall = task_choice(read_kept(tmp_path)).split("\n\n")
    assert tracking == (
        "**To follow a state**, choose GRC scan: 100 [100, 100] % of all positions of 512 elements of S₅ are right, "
        "ahead of GRC scan and memory tree with 99.00 [99.00, 99.00] %. Of the language models, GRC scan solves most "
        "tasks of groups and regular languages, 2 of 2."
    )
    assert recall == (
        "**To recall**, choose memory tree, β ≤ 1: 99.90 [99.90, 99.90] % of the 128 queries in 512 tokens of MQAR are "
        "right, ahead of GRC scan and memory tree with 98.00 [98.00, 98.00] %. **For both in one model**, GRC scan and "
        "memory tree has 99.00 [99.00, 99.00] % on S₅ at 512 elements and 98.00 [98.00, 98.00] % on MQAR with 64 pairs "
        "in 256 tokens, trained on each alone."
    )
    published = task_published(read_kept(tmp_path))
    assert "| GRC scan: 100 [100, 100], 3 seeds; of 4 models | ≥ 99.9 (99.99) |" in published
    assert "GRC scan and memory tree: 99.00 [99.00, 99.00] and 98.00 [98.00, 98.00]" in published
    assert "arXiv 2502.10297" in published
    assert "Mamba-3: 98.5" in published, "also where there is no result of ours"
