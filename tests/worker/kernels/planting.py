"""Plants faults in kernels, to check that the tests' comparisons notice them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import quire_kernels

# Last part of a module's name -> the module's full name. The last parts are unique.
_FOUND = [module.name for module in pkgutil.walk_packages(quire_kernels.__path__, "quire_kernels.")]
MODULES = {name.rpartition(".")[2]: name for name in _FOUND}
assert len(MODULES) == len(_FOUND)


@dataclass(frozen=True, slots=True)
class Fault:
    """One mutation of one module of `quire_kernels`."""

    title: str  # the fault, as a sentence
    module: str  # the last part of the module's name, such as "decode_paged"
    before: str  # the text to replace; must occur exactly once
    after: str
    through: tuple[str, ...] = ()  # chain of modules: each imports the previous module, and the last is tested


def plant(fault: Fault, folder: Path) -> ModuleType:
    """Imports the module with the fault, or the last module of `through`, under a new name, and returns it.

    The real modules are not changed.

    Args:
        fault: the change.
        folder: the folder for the changed sources, because Triton reads sources from files.

    Raises:
        ValueError: the text to change does not occur exactly once.
    """
    source = _source_of(fault.module)
    if source.count(fault.before) != 1:
        raise ValueError(f"{fault.module} has {source.count(fault.before)} times {fault.before!r}")
    planted = _load(fault.module, source.replace(fault.before, fault.after), folder)
    added = [planted.__name__]
    try:
        below = fault.module
        for name in fault.through:
            source = _source_of(name).replace(f"from {MODULES[below]} import", f"from {added[-1]} import")
            planted = _load(name, source, folder)
            added.append(planted.__name__)
            below = name
    finally:
        for name in added:
            sys.modules.pop(name, None)
    return planted


def _source_of(module: str) -> str:
    real = importlib.import_module(MODULES[module])
    assert real.__file__ is not None
    return Path(real.__file__).read_text(encoding="utf-8")


def _load(module: str, source: str, folder: Path) -> ModuleType:
    """Imports a source, and leaves it in `sys.modules` for dataclasses and for modules that import it."""
    path = folder / f"planted_{module}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded
