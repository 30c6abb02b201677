"""Settings from the environment: field `foo_bar` of a pydantic model comes from WEFT_FOO_BAR."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

from weft.errors import ConfigError
from weft.options import MAX_PORT, MAX_THREADS, check_addresses, redact_credentials


class Settings(BaseModel):
    """Base of every process's settings. A wrong value raises ConfigError, which names the variable."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _first_error(error) from None

    def __str__(self) -> str:
        """Format as one line of key=value, without the credentials in URLs."""
        return " ".join(f"{name}={redact_credentials(str(value))}" for name, value in self)


SettingsT = TypeVar("SettingsT", bound=Settings)


def _check_addresses(value: str, info: ValidationInfo) -> str:
    check_addresses(variable_name(str(info.field_name)), value)
    return value


# gRPC would use the lower 16 bits of a larger port. Messages between services hold 64-bit integers.
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Threads = Annotated[int, Field(ge=0, le=MAX_THREADS)]
Share = Annotated[float, Field(gt=0, le=1)]
Address = Annotated[str, AfterValidator(_check_addresses)]


def variable_name(field: str) -> str:
    """Return the environment variable of a field."""
    return f"WEFT_{field.upper()}"


def read_config(cls: type[SettingsT], environ: Mapping[str, str] = os.environ) -> SettingsT:
    """Read the fields' variables; an empty one counts as unset. Raises ConfigError naming the variable."""
    found = {name: environ.get(variable_name(name), "") for name in cls.model_fields}
    return cls(**{name: value for name, value in found.items() if value})


def _first_error(error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False, include_context=False)[0]
    name = variable_name(str(first["loc"][0]))
    if first["type"] == "missing":
        return ConfigError(f"{name} is not set")
    return ConfigError(f"{name}={first['input']!r}: {first['msg'].replace('Input should be', 'expected')}")


def read_models(text: str, name: str = "") -> dict[str, Path]:
    """Return checkpoint directories by served name. WEFT_MODEL is one directory, or NAME=DIR,NAME=DIR.

    A single directory is served as `name`, or under its own name; with a `name` its path may hold any characters.
    Raises ConfigError.
    """
    if name or "=" not in text or os.path.isdir(text):  # isdir never raises, even for a list too long for a path
        return {name or model_name(Path(text)): Path(text)}
    models: dict[str, Path] = {}
    for part in text.split(","):
        served, equals, directory = part.partition("=")
        if not (equals and served.strip() and directory.strip()) or served.strip() in models:
            raise ConfigError(f"WEFT_MODEL={text!r}: expected DIR, or NAME=DIR,NAME=DIR with different names")
        models[served.strip()] = Path(directory.strip())
    return models


def shipped_model() -> Path | None:
    """Return the directory of weft-nano: `models/weft-nano` of the checkout, or package data of the wheel.

    None in an installation that left it out.
    """
    package = Path(__file__).parent
    places = (package.parents[1] / "models" / "weft-nano", package / "weft-nano")
    return next((each for each in places if (each / "config.json").is_file()), None)


def model_name(directory: Path) -> str:
    """Return the name under which a directory is served: its own, or the model's name in a Hugging Face cache.

    A cache directory is `models--ORG--NAME/snapshots/COMMIT`.
    """
    path = directory.resolve()
    repository = path.parent.parent.name
    if path.parent.name != "snapshots" or not repository.startswith("models--"):
        return path.name
    return repository.rpartition("--")[2] or path.name
