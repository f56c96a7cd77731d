"""Which machine the numbers come from, and what was not done there."""

from speed_page.measured import Report


def machine(report: Report) -> str:
    facts, clocks = report["machine"], report["clocks"]
    undone = [
        f"{name}: {failed} of {len(part['results'])} measurements failed"
        for name, part in report["parts"].items()
        if (failed := sum("failed" in one for one in part["results"]))
    ]
    text = (
        f"The run of {report['date']}: one {facts['device']}, torch {facts['torch']}, CUDA {facts['cuda']}, "
        f"Triton {facts.get('triton', 'none')}, Python {facts['python']}; its parts took "
        + ", ".join(f"{part['seconds']:.0f} s ({name})" for name, part in report["parts"].items())
        + f", with what is compiled before them {report['seconds']:.0f} s in all."
    )
    if clocks["after"]:
        during = {name: one["clocks"]["clocks.sm"] for name, one in report["parts"].items() if one.get("clocks")}
        text += f" Driver {clocks['after'].get('driver_version')}."
        if during:
            listed = ", ".join(f"{name} {clock}" for name, clock in during.items())
            text += f" Clock of the processors just after each part, when they may idle: {listed}."
    later = {
        name: part["date"]
        for name, part in report["parts"].items()
        if part.get("date", report["date"]) != report["date"]
    }
    text += f" Measured later: {', '.join(f'{name} on {date}' for name, date in later.items())}." if later else ""
    text += f" {_code(report)}"
    notes = {
        note: None for part in report["parts"].values() for one in part["results"] for note in one.get("notes", ())
    }
    text += f" Not done: {'; '.join(undone)}." if undone else ""
    return text + (f" Our models ran without some of their CUDA graphs: {'; '.join(notes)}." if notes else "")


def _code(report: Report) -> str:
    """Parts may have been measured at different times, and not by the same code."""
    by_code: dict[str, list[str]] = {}
    for name, part in report["parts"].items():
        hashes = part.get("code")
        words = f"{hashes['code']} and {hashes['benchmark']}" if hashes else "unknown"
        by_code.setdefault(words, []).append(name)
    named = (words if len(by_code) == 1 else f"{words} ({', '.join(parts)})" for words, parts in by_code.items())
    return f"Hashes of the package's and the benchmark's code: {'; '.join(named)}."
