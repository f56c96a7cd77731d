"""Whether acceleration changes results: the same runs with and without it."""

from logdepth.atomic import read_json
from logdepth.errors import UserError
from speed_page.measured import ROOT, Report
from speed_page.tables import table


def comparison() -> Report:
    """Return the results of benchmarks/accelerated.py."""
    reports = [read_json(path) for path in (ROOT / "results").glob("accelerated-*.json")]
    if not reports:
        raise UserError("no results/accelerated-*.json: run benchmarks/accelerated.py first")
    found: Report = max(reports, key=lambda report: str(report["environment"]))
    return found


def same_results() -> str:
    found = comparison()
    rows = [
        [f"{one['context']:,}", f"{one['plain']:.4f}", f"{one['accelerated']:.4f}", f"{one['ratio']:.6f}"]
        for one in found["evaluations"]
    ]
    ends = [
        [str(one["seed"]), "accelerated" if one["accelerated"] else "plain"]
        + [f"{perplexity:.2f}" for _, perplexity in one["valid_perplexity"]]
        for one in found["runs"]
    ]
    steps = [f"after step {step}" for step, _ in found["runs"][0]["valid_perplexity"]]
    return (
        f"`python benchmarks/accelerated.py` trains `{found['recipe']}` for {found['steps']} steps. This is the test "
        "perplexity of one checkpoint (seed 0, plain path), evaluated with both paths:\n\n"
        + table(["context", "plain", "accelerated", "ratio"], rows)
        + "\n\nThis is the validation perplexity of runs trained with each path. Both start from the same weights and "
        "see the same batches. Their dropout masks differ.\n\n" + table(["seed", "path", *steps], ends)
    )
