"""`trioengine doctor`: all the looks, as a page or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trioengine.cli.doctor.machine import Machine
from trioengine.cli.doctor.model_cache import model_cache
from trioengine.cli.doctor.part import Part, Severity
from trioengine.cli.doctor.software import versions, worker
from trioengine.core.bounds import printable

_LABELS = {"sha256_ok": "checksum right", "container_left_bytes": "left in container"}
_ABSENT = {"container_left_bytes": "no limit"}
_TITLE_WIDTH = 20
_GB = 10**9


def looks() -> Mapping[str, Callable[[], Part]]:
    """What is looked at, in order."""
    machine = Machine()
    return {
        "versions": versions,
        "worker": worker,
        "processor": machine.cores,
        "memory": machine.memory,
        "limits": machine.limits,
        "models": model_cache,
    }


def examine(parts: Mapping[str, Callable[[], Part]], *, as_json: bool) -> int:
    """Print what is found; 1 if serving the default model cannot work."""
    found = {title: look() for title, look in parts.items()}
    problems = [problem for part in found.values() for problem in part.problems]
    works = all(problem.severity is not Severity.FATAL for problem in problems)
    if as_json:
        said = [{"severity": p.severity.value, "message": p.message, "remedy": p.remedy} for p in problems]
        print(json.dumps({"works": works, "problems": said} | {title: part.facts for title, part in found.items()}))
        return int(not works)
    for title, part in found.items():
        print(title)
        for name, value in part.facts.items():
            _print_fact(name, value)
    print("problems" if problems else "no problems")
    for problem in problems:
        print(f"  {problem.severity.value}: {printable(problem.message)}\n    -> {printable(problem.remedy)}")
    return int(not works)


def _print_fact(name: str, value: Any) -> None:
    if isinstance(value, dict):
        for inner, its_value in value.items():
            _print_fact(inner, its_value)
        return
    if name.endswith("_bytes") and isinstance(value, int):
        value = f"{value / 1e9:.2f} GB" if value >= _GB else f"{value / 1e6:.0f} MB"
    if isinstance(value, (list, dict)):
        value = ", ".join(str(entry) for entry in value) or "none"
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if value is None:
        value = _ABSENT.get(name, "-")
    label = _LABELS.get(name) or name.removesuffix("_bytes").replace("_", " ")
    print(f"  {label:{_TITLE_WIDTH}} {printable(str(value))}")
