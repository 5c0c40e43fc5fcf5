"""The machines by name: trioengine's own, and classes of other modules and files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from trioengine.testing.fuzz.client_machine import ClientMachine
from trioengine.testing.fuzz.core_machine import CoreMachine
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.http_machine import HttpMachine
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.power_machine import PowerMachine
from trioengine.testing.fuzz.program import Program
from trioengine.testing.fuzz.realtime_machine import RealtimeMachine

_ALL: tuple[type[Machine], ...] = (
    EngineMachine,
    PowerMachine,
    RealtimeMachine,
    HttpMachine,
    ClientMachine,
    CoreMachine,
)
MACHINES = {machine.__name__: machine for machine in _ALL}
_SHORT = {name.removesuffix("Machine").lower(): name for name in MACHINES}


def machine_named(name: str) -> type[Machine]:
    """Return the machine of a name: `engine` or `EngineMachine`, `package.module:Class`, or `path/file.py:Class`.

    The module, or the file, is imported with the working directory and the file's own on `sys.path`. Raises ValueError
    if no machine has this name; an exception of the module itself propagates.
    """
    where, is_elsewhere, class_name = name.rpartition(":")
    if not is_elsewhere:
        if (whole := _SHORT.get(name, name)) not in MACHINES:
            raise ValueError(f"no machine {name!r}; there are {', '.join(_SHORT)}, module:Class and file.py:Class")
        return MACHINES[whole]
    module = _from_file(Path(where)) if where.endswith(".py") else _from_module(where)
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Machine)):
        raise ValueError(f"{where} has no machine {class_name!r}; machines are subclasses of LifecycleMachine")
    return found


def _from_module(name: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        raise ValueError(f"no module {name!r}") from exc


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r}")
    _look_in(path.parent.resolve())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "it is a .py file"
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def machine_of(program: Program) -> type[Machine]:
    """Return the machine on which a program was found. Raises ValueError if it does not exist."""
    return machine_named(program.machine).with_variant(program.variant)


def name_of(machine: type[Machine]) -> str:
    """Return the name by which `machine_named` finds a class, from the working directory."""
    if MACHINES.get(machine.__name__) is machine:
        return machine.__name__
    file = Path(sys.modules[machine.__module__].__file__ or "")
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return f"{file}:{machine.__name__}"
