"""`trioengine doctor`: run all checks, and print their results as a page or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from trioengine.cli.doctor.checks import (
    CheckResult,
    Severity,
    check_cores,
    check_limits,
    check_memory,
    check_models,
    check_versions,
    check_worker,
)
from trioengine.core.wording import printable

Check: TypeAlias = Callable[[], CheckResult]
CHECKS: Mapping[str, Check] = {  # by title, in the order of the page
    "versions": check_versions,
    "worker": check_worker,
    "processor": check_cores,
    "memory": check_memory,
    "limits": check_limits,
    "models": check_models,
}
_LABELS = {"sha256_ok": "checksum right", "container_left_bytes": "left in container"}
_ABSENT = {"container_left_bytes": "no limit"}
_TITLE_WIDTH = 20
_GB = 10**9


def run_checks(checks: Mapping[str, Check], *, as_json: bool) -> int:
    """Print the results; return 1 if serving the default model cannot work, else 0."""
    results = {title: check() for title, check in checks.items()}
    problems = [problem for result in results.values() for problem in result.problems]
    works = all(problem.severity is not Severity.FATAL for problem in problems)
    if as_json:
        listed = [{"severity": p.severity.value, "message": p.message, "remedy": p.remedy} for p in problems]
        facts = {title: result.facts for title, result in results.items()}
        print(json.dumps({"works": works, "problems": listed} | facts))
        return int(not works)
    for title, result in results.items():
        print(title)
        for name, value in result.facts.items():
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
    if isinstance(value, list):
        value = ", ".join(str(entry) for entry in value) or "none"
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if value is None:
        value = _ABSENT.get(name, "-")
    label = _LABELS.get(name) or name.removesuffix("_bytes").replace("_", " ")
    print(f"  {label:{_TITLE_WIDTH}} {printable(str(value))}")
