"""The catalog of served models: looks up the models that the current principal may use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from weft.errors import InvalidRequest, NotFound
from weft_services.gateway.access.authentication import current_principal
from weft_services.gateway.model import ServedModel, load_model

# Longest part of an unknown model name that an error repeats; served names are at most as long.
MAX_NAME_CHARS_IN_ERRORS = 256


class Catalog:
    """Served models by name, in configuration order."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        may_use = current_principal.get().may_use
        return (model for name, model in self._models.items() if may_use(name))

    @property
    def names(self) -> list[str]:
        return [model.name for model in self]

    def resolve(self, name: str) -> ServedModel:
        """Return the model of that name, or the only one if the name is empty.

        Raises NotFound, or InvalidRequest if the name is empty and several models are served.
        """
        names = self.names
        if not name and len(names) > 1:
            raise InvalidRequest(f"model: expected one of {_listed(names)}", "model")
        return self.find(name or "".join(names))

    def find(self, name: str) -> ServedModel:
        """Return the model of that name. Raises NotFound, which lists the names."""
        if name in self._models and current_principal.get().may_use(name):
            return self._models[name]
        names, name = self.names, name[:MAX_NAME_CHARS_IN_ERRORS]
        if not names:
            raise NotFound(f"the model {name!r} is not served here, or not to this API key")
        raise NotFound(f"the model {name!r} is not served here; use {_listed(names)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def load_catalog(
    directories: Mapping[str, Path], tool_formats: Mapping[str, str], escapes_special_tokens: bool = False
) -> Catalog:
    """Load what the gateway needs of each checkpoint. Raises BadCheckpoint naming the file or setting.

    `escapes_special_tokens`: special tokens in messages are plain text.
    """
    return Catalog(
        load_model(path, name, tool_formats[name], escapes_special_tokens) for name, path in directories.items()
    )
