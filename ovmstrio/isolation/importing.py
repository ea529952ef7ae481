"""Import handler files so that none can get in another's way.

Each load gets a package of its own in ``sys.modules`` whose path is the handler's folders, and the handler is a module
of that package.  Modules loaded for it have an ``__import__`` of their own that looks into the folders first: so
``from config import x`` finds the handler's own ``config.py``, however many other handlers have one, and neither
``sys.path`` nor a module of the server or of the standard library changes for anybody else.
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

from ovmstrio.util.regular_files import read_regular_bytes

__all__ = ["ROOT", "HandlerPackage"]

ROOT: Final = "ovms_handlers"
_numbers: Final = itertools.count(1)


class HandlerPackage:
    """The modules of one loaded handler.

    Args:
        folders: where the handler's modules lie, usually only the folder of its file; the first one comes first.
        is_public: whether its modules bear their plain names, too, where nobody else has them: for what looks classes
            up by the names of their modules, as pickles do.  Only one handler of a process can have this.
    """

    def __init__(self, *folders: Path, is_public: bool = False) -> None:
        _ensure_root()
        self.name = f"{ROOT}.n{next(_numbers)}"
        self._is_public = is_public
        self._public: dict[str, ModuleType] = {}
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
        """Run a file of the folders as a module and give it; blocking.

        Raises:
            BaseException: whatever the file raises.
        """
        importlib.invalidate_caches()
        name = f"{self.name}.{file.stem}"
        spec = spec_from_file_location(name, file, loader=_Loader(name, str(file), self))
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} cannot be loaded as Python")
        module = module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module

    def provide(self, name: str, module: ModuleType) -> None:
        """Let the modules of this package import a module that is none of their folders'; ``name`` may have dots."""
        sys.modules[f"{self.name}.{name}"] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(self._parent(parent), leaf, module)

    def _parent(self, name: str) -> ModuleType:
        """Give a package of the folders by its name; an empty one if there is none."""
        full = f"{self.name}.{name}"
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError:
            package = ModuleType(full, "Holds modules that were provided.")
            package.__path__ = []
            self.provide(name, package)
            return package

    def unload(self) -> None:
        """Forget all modules of the package."""
        _packages.pop(self.name, None)
        for name in [each for each in list(sys.modules) if each == self.name or each.startswith(f"{self.name}.")]:
            del sys.modules[name]
        for name, module in self._public.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def builtins_of(self) -> dict[str, Any]:
        """Give what the modules of this package have as ``__builtins__``."""
        return self._builtins

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002 - the names are those of builtins.__import__
        locals: Mapping[str, Any] | None = None,  # noqa: A002 - as above
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not self._is_sibling(top, "" if globals is None else globals.get("__name__", "")):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = builtins.__import__(f"{self.name}.{name}", globals, locals, fromlist or ("__name__",), 0)
        if self._is_public:
            self._publish(name)
        return module if fromlist else sys.modules[f"{self.name}.{top}"]

    def _publish(self, name: str) -> None:
        """Let a module and the packages that it is in be found by their plain names."""
        while name:
            module = sys.modules[f"{self.name}.{name}"]
            if sys.modules.setdefault(name, module) is module:
                self._public[name] = module
            name = name.rpartition(".")[0]

    def _is_sibling(self, top: str, importer: str) -> bool:
        """Tell whether the folders have such a module; one that imports its own name means another."""
        name = f"{self.name}.{top}"
        if name == importer:
            return False
        if name in sys.modules:
            return True
        spec = PathFinder.find_spec(name, self._folders)
        if spec is None or spec.origin is not None:
            return spec is not None
        # Any folder could be a package without __init__.py, so that it comes after everything that is installed.
        return importlib.util.find_spec(top) is None


class _Loader(SourceFileLoader):
    """Loads a module of a handler's package, always from its source: a cache may miss a change within a second."""

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
    """Finds the modules of handlers' packages, and nothing else."""

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
    root = ModuleType(ROOT, "Holds the modules of handlers, each load in a package of its own.")
    root.__path__ = []
    sys.modules[ROOT] = root
    sys.meta_path.insert(0, _Finder())
