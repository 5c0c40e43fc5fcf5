"""Cores, instruction sets, memory and limits, as Linux tells them; also what a container leaves of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trioengine.cli.doctor.checks import Part, Problem, fatal, warning

NEEDED_MEMORY = 1 << 30  # bytes; a worker with the default model in float32 takes 0.9 GB, before its KV cache
FEW_DESCRIPTORS = 1024
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where Linux tells it."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")

    def cores(self) -> Part:
        """What may be used of them; `quota` is the container's, in cores."""
        usable, quota = len(os.sched_getaffinity(0)), self._quota()
        facts = {
            "cores": os.cpu_count(),
            "usable_cores": usable,
            "quota_cores": quota,
            "cpu": self._cpu("model name"),
            "instruction_sets": [name for name in INSTRUCTION_SETS if name in self._flags()],
        }
        problems = []
        if quota is not None and quota < usable:
            problems.append(
                warning(
                    f"the container may use {quota:g} cores, and a thread is started for each of {usable}",
                    f"serve with --num-threads {max(1, round(quota))}",
                )
            )
        return Part(facts, tuple(problems))

    def memory(self) -> Part:
        """Free memory, and what the container leaves of it."""
        available, left = self._meminfo("MemAvailable"), self._container_memory()
        facts = {
            "total_bytes": self._meminfo("MemTotal"),
            "available_bytes": available,
            "container_left_bytes": left,
        }
        usable = [size for size in (available, left) if size is not None]
        problems: list[Problem] = []
        if usable and min(usable) < NEEDED_MEMORY:
            what = f"{min(usable) >> 20} MiB of memory are free, the default model needs {NEEDED_MEMORY >> 20} MiB"
            problems.append(fatal(what, "end other programs, or give the container more"))
        return Part(facts, tuple(problems))

    def limits(self) -> Part:
        """Of this process."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        problems = []
        if hard != resource.RLIM_INFINITY and hard < FEW_DESCRIPTORS:
            what = f"at most {hard} descriptors: so many connections less 64 are served"
            problems.append(warning(what, "raise the hard limit (ulimit -Hn, LimitNOFILE= in a systemd unit)"))
        return Part({"descriptors_soft": _limit(soft), "descriptors_hard": _limit(hard)}, tuple(problems))

    # ---- files ----------------------------------------------------------------------------------------------------

    def _cpu(self, key: str) -> str | None:
        for line in _text(self.proc / "cpuinfo").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
        return None

    def _flags(self) -> set[str]:
        return set((self._cpu("flags") or self._cpu("Features") or "").split())

    def _meminfo(self, key: str) -> int | None:
        for line in _text(self.proc / "meminfo").splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return int(value.split()[0]) * 1024
        return None

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

    def _container_memory(self) -> int | None:
        """The least that a group's limit leaves; caches that the kernel would give up count as used."""
        names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
        left = [
            max(0, limit - (_number(group / used_name) or 0))
            for group in self._groups("memory")
            for limit_name, used_name in names
            if (limit := _number(group / limit_name)) is not None and limit < 1 << 60  # version 1's infinity
        ]
        return min(left, default=None)

    def _quota(self) -> float | None:
        quotas = []
        for group in self._groups("cpu"):
            quota, _, period = _text(group / "cpu.max").strip().partition(" ")
            if not quota:
                quota, period = _text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()
            if quota.isdigit() and period.isdigit():
                quotas.append(int(quota) / int(period))
        return min(quotas, default=None)


def _text(path: Path) -> str:
    """Empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value
