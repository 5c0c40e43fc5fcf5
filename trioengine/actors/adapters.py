"""The LoRA adapters of an engine, by their names. The worker loads one with the first request that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from trioengine.actors.ports import Ports
from trioengine.actors.power_change import path_of
from trioengine.core.checks import rejected
from trioengine.core.errors import ModelError, RequestRejected
from trioengine.core.messages import Adapter
from trioengine.core.wording import brief
from trioengine.hub.model_info import ModelInfo

_MAX_NAME = 256  # characters


class Adapters:
    """A name belongs to one adapter, from the call that adds it until it is removed."""

    def __init__(self, ports: Ports, mint: Callable[[], int]) -> None:
        self._ports, self._mint = ports, mint
        self.by_name: Mapping[str, Adapter] = MappingProxyType({})  # other threads read it: replaced, never changed
        self._taken: set[str] = set()  # by calls that check the files

    @property
    def paths(self) -> Mapping[str, str]:
        """The directories, by the names."""
        return MappingProxyType({name: adapter.path for name, adapter in self.by_name.items()})

    async def add(self, name: str, path: str | Path, model: ModelInfo) -> None:
        """Check the files of an adapter of the model, and add it. Cancelled, nothing is added.

        Raises RequestRejected for a name that is taken, and files that do not fit.
        """
        checked, directory = _check_name(name), Path(path_of(path))
        with self._taking(checked):
            try:
                await self._ports.run_in_thread(self._ports.check_adapter, directory, model.matrices)
            except ModelError as exc:
                raise RequestRejected.at("path", "invalid_adapter", str(exc)) from exc
            self.by_name = MappingProxyType({**self.by_name, checked: Adapter(self._mint(), str(directory))})

    def remove(self, name: str) -> None:
        """Forget the name; sessions that have the adapter keep it. Raises RequestRejected for an unknown name."""
        gone = self.find(name)
        self.by_name = MappingProxyType({key: each for key, each in self.by_name.items() if each is not gone})

    def find(self, name: str) -> Adapter:
        """Return the adapter of this name. Raises RequestRejected if no adapter has it."""
        if not isinstance(name, str) or name not in self.by_name:
            known = ", ".join(map(brief, self.by_name)) or "none"
            problem = f"adapter {brief(name)} is not loaded; loaded: {known}"
            raise RequestRejected("adapter_not_found", problem, param="adapter")
        return self.by_name[name]

    @contextmanager
    def _taking(self, name: str) -> Iterator[None]:
        if name in self.by_name or name in self._taken:
            problem = f"name {brief(name)} belongs to an adapter already: unload it first, or choose another name"
            raise RequestRejected("adapter_exists", problem, param="name")
        self._taken.add(name)
        try:
            yield
        finally:
            self._taken.remove(name)


def _check_name(name: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise rejected("name", f"must be a string of 1 to {_MAX_NAME} printable characters, got {brief(name)}")
    return name
