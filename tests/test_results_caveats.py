"""Caveats: each is listed once, with its studies and the models that they lack."""

import dataclasses
from pathlib import Path

from logdepth.results import write_result
from results_page.headline import caveats
from results_page.kept import read_kept
from results_page.readme import readme_block
from tests.kept_results import a_run, add_study

SCAN = ("ar-grc", "ar-mlp-ldru")


def test_studies_that_differ_only_in_missing_models_share_a_caveat(tmp_path: Path) -> None:
    add_study(tmp_path / "wikitext2", seeds=1)
    add_study(tmp_path / "wikitext2-tuned", seeds=1, models=("transformer-alibi",))
    add_study(tmp_path / "wikitext2-post-merge", seeds=1, models=(*SCAN, "transformer-alibi"))
    text = caveats(read_kept(tmp_path))
    assert text.startswith(
        "- *WikiText-2, paper's settings; WikiText-2, tuned; WikiText-2, net on all merges.* Test split"
    )
    assert text.endswith(
        " the paper's raw text. Not run: AR-GRC, AR-MLP-LDRU and Transformer (sinusoidal) of WikiText-2, tuned; "
        "Transformer (sinusoidal) of WikiText-2, net on all merges."
    )
    assert text.count("Test split") == 1


def test_studies_of_different_text_have_separate_caveats(tmp_path: Path) -> None:
    add_study(tmp_path / "ptb", seeds=1, models=("transformer-alibi", "transformer-sinusoidal"))
    run = a_run("ptb-tuned", "ar-grc", 0)
    write_result(
        tmp_path / "ptb-tuned" / "a.json",
        dataclasses.replace(run, data=dataclasses.replace(run.data, vocab_size=1000)),
    )
    first, second = caveats(read_kept(tmp_path)).splitlines()
    assert first.endswith(" Not run: AR-GRC and AR-MLP-LDRU of PTB.")
    assert second.endswith(" Not run: AR-MLP-LDRU, Transformer (ALiBi) and Transformer (sinusoidal) of PTB, tuned.")


def test_complete_studies_list_no_missing_models(tmp_path: Path) -> None:
    for study in ("wikitext2", "wikitext2-tuned"):
        add_study(tmp_path / study, seeds=1)
    kept = read_kept(tmp_path)
    assert caveats(kept).endswith("which is not comparable with the paper's raw text.")
    assert "Not run yet" not in readme_block(kept)


def test_the_readme_lists_missing_models_once_per_study(tmp_path: Path) -> None:
    add_study(tmp_path / "wikitext2", seeds=1, models=SCAN)
    not_begun = "Not run yet: WikiText-2, tuned; Transformer (ALiBi) and Transformer (sinusoidal) of WikiText-2, paper"
    assert f"\n\n{not_begun}'s settings.\n\n" in readme_block(read_kept(tmp_path))
    add_study(tmp_path / "wikitext2-tuned", seeds=1, models=SCAN[:1])
    begun = "AR-MLP-LDRU, Transformer (ALiBi) and Transformer (sinusoidal) of WikiText-2, tuned.\n"
    assert f"of WikiText-2, paper's settings; {begun}" in readme_block(read_kept(tmp_path))
