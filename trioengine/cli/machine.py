"""Cores, instruction sets and memory, read from Linux's /proc, and the limits of a container's control groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
