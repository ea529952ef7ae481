"""Isolated imports of handler files.

Each load gets its own package in ``sys.modules``, whose path is the handler's folders; the handler is a module of that
package. Its modules have their own ``__import__``, which searches these folders first. So ``from config import x``
finds the handler's ``config.py`` even if other handlers have one, and ``sys.path`` and other modules do not change.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from ovmstrio.isolation.compat_path import add_compat_path
from ovmstrio.util.regular_files import read_regular_bytes

ROOT: Final = "ovms_handlers"
_numbers: Final = itertools.count(1)


class HandlerPackage:
    """Modules of one loaded handler.

    Args:
        folders: folders of the handler's modules, usually that of its file; earlier ones take precedence.
        is_public: also register modules under their plain names, where unused, for lookups by module name such as
            pickle. At most one handler per process.
    """

    def __init__(self, *folders: Path, is_public: bool = False) -> None:
        _ensure_root()
        add_compat_path()
        self.name = f"{ROOT}.n{next(_numbers)}"
        self._is_public = is_public
        self._public_modules: dict[str, ModuleType] = {}
        self._folders = [str(folder) for folder in folders]
        self._builtins = {**vars(builtins), "__import__": self._import}
        package = ModuleType(self.name, "The modules of one loaded handler.")
        package.__path__ = list(self._folders)
        package.__package__ = self.name
        package.__spec__ = ModuleSpec(self.name, None, is_package=True)
        self._package = package
        sys.modules[self.name] = package
        _packages[self.name] = self

    def load(self, file: Path) -> ModuleType:
        """Run a file of the folders as a module and return the module; blocking. Raises whatever the file raises."""
        importlib.invalidate_caches()
        name = f"{self.name}.{file.stem}"
        spec = spec_from_file_location(name, file, loader=_Loader(name, str(file), self))
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} cannot be loaded as a Python module")
        module = module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module

    def provide(self, name: str, module: ModuleType) -> None:
        """Make a module from elsewhere importable in this package; ``name`` may be dotted."""
        sys.modules[f"{self.name}.{name}"] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(self._parent(parent), leaf, module)

    def _parent(self, name: str) -> ModuleType:
        """Return a package of the folders, or create an empty one."""
        full = f"{self.name}.{name}"
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError:
            package = ModuleType(full, "Holds modules that were provided.")
            package.__path__ = []
            self.provide(name, package)
            return package

    def unload(self) -> None:
        """Remove all modules of the package from ``sys.modules``."""
        _packages.pop(self.name, None)
        for name in [each for each in list(sys.modules) if each == self.name or each.startswith(f"{self.name}.")]:
            del sys.modules[name]
        for name, module in self._public_modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def builtins_of(self) -> dict[str, Any]:
        """Return the ``__builtins__`` of the package's modules."""
        return self._builtins

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002 - signature of builtins.__import__
        locals: Mapping[str, Any] | None = None,  # noqa: A002 - signature of builtins.__import__
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not self._is_own_module(top, "" if globals is None else globals.get("__name__", "")):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = builtins.__import__(f"{self.name}.{name}", globals, locals, fromlist or ("__name__",), 0)
        if self._is_public:
            self._publish(name)
        return module if fromlist else sys.modules[f"{self.name}.{top}"]

    def _publish(self, name: str) -> None:
        """Register a module and its parent packages under their plain names."""
        while name:
            module = sys.modules[f"{self.name}.{name}"]
            if sys.modules.setdefault(name, module) is module:
                self._public_modules[name] = module
            name = name.rpartition(".")[0]

    def _is_own_module(self, top: str, importer: str) -> bool:
        """Return whether the folders contain the module; a module that imports its own name means another one."""
        name = f"{self.name}.{top}"
        if name == importer:
            return False
        if name in sys.modules:
            return True
        spec = PathFinder.find_spec(name, self._folders)
        if spec is None or spec.origin is not None:
            return spec is not None
        # Any folder could be a namespace package, so installed modules take precedence.
        return importlib.util.find_spec(top) is None


class _Loader(SourceFileLoader):
    """Loader without a bytecode cache, which may miss changes within a second."""

    def __init__(self, name: str, path: str, package: HandlerPackage) -> None:
        super().__init__(name, path)
        self._handler_package = package

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code

    def get_data(self, path: str) -> bytes:
        return read_regular_bytes(path)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._handler_package.builtins_of()
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finder of modules in handler packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{ROOT}."):
            return None
        package = _packages.get(".".join(fullname.split(".", 2)[:2]))
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and package is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, package)
        return spec


_packages: Final[dict[str, HandlerPackage]] = {}


def _ensure_root() -> None:
    if ROOT in sys.modules:
        return
    root = ModuleType(ROOT, "Holds the modules of handlers, each load in a separate package.")
    root.__path__ = []
    sys.modules[ROOT] = root
    sys.meta_path.insert(0, _Finder())
