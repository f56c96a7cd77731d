"""The machine and the code that the numbers come from, and the measurements that failed."""

from speed_page.measured import Report


def machine(report: Report) -> str:
    facts, clocks = report["machine"], report["clocks"]
    undone = [
        f"{name}: {failed} of {len(part['results'])} measurements failed"
        for name, part in report["parts"].items()
        if (failed := sum("failed" in one for one in part["results"]))
    ]
    text = (
        f"Date of the run: {report['date']}. Machine: one {facts['device']}, torch {facts['torch']}, CUDA "
        f"{facts['cuda']}, Triton {facts.get('triton', 'none')}, Python {facts['python']}. Duration of its parts: "
        + ", ".join(f"{part['seconds']:.0f} s ({name})" for name, part in report["parts"].items())
        + f". Duration of the whole run, compilation included: {report['seconds']:.0f} s."
    )
    if clocks["after"]:
        during = {name: one["clocks"]["clocks.sm"] for name, one in report["parts"].items() if one.get("clocks")}
        text += f" Driver {clocks['after'].get('driver_version')}."
        if during:
            listed = ", ".join(f"{name} {clock}" for name, clock in during.items())
            text += f" Clock of the multiprocessors just after each part, when they may be idle: {listed}."
    later = {
        name: part["date"]
        for name, part in report["parts"].items()
        if part.get("date", report["date"]) != report["date"]
    }
    text += f" Measured later: {', '.join(f'{name} on {date}' for name, date in later.items())}." if later else ""
    text += f" {code_hashes(report)}"
    notes = {
        note: None for part in report["parts"].values() for one in part["results"] for note in one.get("notes", ())
    }
    text += f" Failed: {'; '.join(undone)}." if undone else ""
    return text + (f" Our models ran without some of their CUDA graphs: {'; '.join(notes)}." if notes else "")


def code_hashes(report: Report) -> str:
    """Return the hashes of the measured code; parts may have been measured with different code."""
    by_code: dict[str, list[str]] = {}
    for name, part in report["parts"].items():
        hashes = part.get("code")
        words = f"{hashes['code']} and {hashes['benchmark']}" if hashes else "unknown"
        by_code.setdefault(words, []).append(name)
    named = (words if len(by_code) == 1 else f"{words} ({', '.join(parts)})" for words, parts in by_code.items())
    return f"Hashes of the package's and the benchmark's code: {'; '.join(named)}."
