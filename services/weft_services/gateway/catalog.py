"""The models that are served, by the names that requests use, as far as the visitor may use them. Knows nothing of who
serves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from weft.errors import InvalidRequest, NotFound
from weft_services.gateway.access.visitor import visitor
from weft_services.gateway.model import ServedModel, load_model

# of a name that is not served: as many as one that is may have
MAX_TOLD_CHARS = 256


class Catalog:
    """In the order in which they were given."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        may_use = visitor.get().may_use
        return (model for name, model in self._models.items() if may_use(name))

    @property
    def names(self) -> list[str]:
        """Of all of them."""
        return [model.name for model in self]

    def meant(self, name: str) -> ServedModel:
        """The model of that name, or without a name the only one. Raises NotFound, or InvalidRequest where there is a
        choice."""
        names = self.names
        if not name and len(names) > 1:
            raise InvalidRequest(f"model: name one of {_listed(names)}", "model")
        return self.find(name or "".join(names))

    def find(self, name: str) -> ServedModel:
        """The model of that name. Raises NotFound, which says what names there are."""
        if name in self._models and visitor.get().may_use(name):
            return self._models[name]
        names, name = self.names, name[:MAX_TOLD_CHARS]
        if not names:
            raise NotFound(f"the model {name!r} is not served here, or not to this API key")
        raise NotFound(f"the model {name!r} is not served here; there is {_listed(names)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def load_catalog(directories: Mapping[str, Path], tool_formats: Mapping[str, str], are_sealed: bool = False) -> Catalog:
    """Read what the gateway needs of each checkpoint. `are_sealed`: special tokens in messages are text. Raises
    BadCheckpoint naming the file or setting at fault."""
    return Catalog(load_model(path, name, tool_formats[name], are_sealed) for name, path in directories.items())
