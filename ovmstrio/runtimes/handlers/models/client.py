"""What a handler's constructor gets as ``model_client``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import trio

from cortex_internal.lib.client.python import ModelClient as ModelClientBase
from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.runtimes.handlers.config.project_spec import DEFAULT_MODEL, ModelsSpec
from ovmstrio.runtimes.handlers.models.loader import LoadModel, ModelLoader
from ovmstrio.runtimes.handlers.models.shelf import Shelf
from ovmstrio.runtimes.handlers.models.tree import LATEST, is_version

__all__ = ["ModelClient", "ModelNames", "version_text"]

_SHOWN: Final = 20


def version_text(version: str | int | None) -> str:
    """Read the version that somebody asks for: a number, or nothing or ``latest`` for the highest one.

    Raises:
        UserRuntimeException: it is neither.
    """
    if version is None or version in {LATEST, ""}:
        return LATEST
    text = str(version)
    if isinstance(version, bool) or not is_version(text):
        raise UserRuntimeException(f"model version {version!r} is invalid", "expected a number, or 'latest'")
    return text


class ModelNames:
    """Which names may be asked for.

    Args:
        spec: how the project names its models, and which it lists itself.
        shelf: knows the others.
    """

    def __init__(self, spec: ModelsSpec, shelf: Shelf) -> None:
        self._has_one = spec.kind == "path"
        self._listed = frozenset(entry.name for entry in spec.entries)
        self._shelf = shelf

    @property
    def known(self) -> list[str]:
        """The names that there are, sorted."""
        return sorted(self._listed or {key.name for key in self._shelf.catalog})

    def check(self, name: str | None) -> str:
        """Give the name of the model that is meant.

        Raises:
            UserRuntimeException: none is given where there are many, or there is no such model.
        """
        if self._has_one:
            return DEFAULT_MODEL
        if name is not None and (name in self._listed or self._shelf.versions(name)):
            return name
        known = self.known
        listing = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
        what = "model_name was not specified" if name is None else f"model {name!r} was not found"
        raise UserRuntimeException(what, f"choose one of the following: {listing}")


class ModelClient(ModelClientBase):
    """Gives models to the handler's code, from any of its threads, in its constructor too.

    A model that is given stays as it is, its files too, until the call of the handler ends in which it was asked for.

    Args:
        shelf: what is here.
        loader: gives that, and loads what is not.
        names: the names that may be asked for.
        is_caching: whether models come and go by their use.
    """

    def __init__(
        self,
        shelf: Shelf,
        loader: ModelLoader,
        names: ModelNames,
        *,
        is_caching: bool,
    ) -> None:
        self._shelf = shelf
        self._loader = loader
        self._names = names
        self._is_caching = is_caching

    def get_model(self, model_name: str | None = None, model_version: str | int | None = LATEST) -> Any:
        """Give what ``load_model`` returned for a version of a model, loading it if need be.

        Args:
            model_name: of the model; not needed, and not looked at, where there is one only by its ``path``.
            model_version: a number, or the highest one for ``"latest"``, None and nothing.

        Raises:
            UserRuntimeException: there is no such model or version, or it cannot be loaded.
        """
        version = LATEST if model_version is None or model_version == LATEST else version_text(model_version)
        name = self._names.check(model_name)
        return self._loader.get(name, version).value

    async def aget_model(self, model_name: str | None = None, model_version: str | int | None = LATEST) -> Any:
        """Give a model as :meth:`get_model` does, for handlers whose methods are ``async def``.

        Raises:
            UserRuntimeException: as there.

        Cancellation: at once; what is being loaded is loaded all the same.
        """
        await trio.lowlevel.checkpoint()
        version, name = version_text(model_version), self._names.check(model_name)
        return (await self._loader.aget(name, version)).value

    def set_load_method(self, load_model: LoadModel) -> None:
        """Say how models are loaded from their folders."""
        self._loader.load_model = load_model

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The models by name, each with its ``versions``, the highest first, and their ``timestamps``."""
        return self._shelf.metadata()

    @property
    def caching(self) -> bool:
        """Whether models come and go by their use."""
        return self._is_caching
