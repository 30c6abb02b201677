"""The gateway's settings; docs/reference/settings.md has the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from weft.config import Address, Port, Settings, read_models
from weft.errors import ConfigError
from weft.options import is_loopback

MAX_RESPONSES_SECONDS = 30 * 24 * 3600
Seconds = Annotated[float, Field(gt=0)]
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#@*]+")


class GatewayConfig(Settings):
    """Each field is read from WEFT_<NAME>."""

    model: str
    scheduler_addr: Address
    model_name: str = ""
    tool_format: str = "auto"
    allow_user_special_tokens: bool = True
    host: str = "127.0.0.1"
    keys: str = ""
    allow_unauthenticated: bool = False
    redis_url: str = ""
    responses_seconds: Annotated[float, Field(ge=0, le=MAX_RESPONSES_SECONDS)] = 3600.0
    http_port: Port = 8000
    grpc_port: Port = 9000
    reuse_port: bool = False
    private_host: str = "127.0.0.1"
    private_port: Port | None = None
    cors_origins: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_requests: Annotated[int, Field(ge=1)] = 1024
    request_timeout_seconds: Seconds = 600.0
    migration_timeout_seconds: Seconds = 30.0
    grace_seconds: Seconds = 5.0

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        self._check_models()
        if not all(":" in address for address in self.scheduler_addr.split(",")):
            raise ConfigError(f"WEFT_SCHEDULER_ADDR={self.scheduler_addr!r}: expected host:port, separated by commas")
        if not (self.keys or self.allow_unauthenticated or is_loopback(self.host)):
            raise ConfigError(
                f"WEFT_HOST={self.host}: every host that reaches it could use the model; name API keys with WEFT_KEYS "
                "(`weft keys add NAME --keys FILE` creates them), or set WEFT_ALLOW_UNAUTHENTICATED=1"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "WEFT_TLS_CERT" if self.tls_cert is None else "WEFT_TLS_KEY"
            raise ConfigError(f"WEFT_TLS_CERT and WEFT_TLS_KEY must be set together; {missing} is missing")
        if self.reuse_port and not (self.http_port and self.grpc_port):
            raise ConfigError("WEFT_REUSE_PORT=1 needs WEFT_HTTP_PORT and WEFT_GRPC_PORT other than 0")
        for origin in self.allowed_origins:
            if not ORIGIN.fullmatch(origin):
                expected = "expected * or origins separated by commas, such as https://app.example, without a path"
                raise ConfigError(f"WEFT_CORS_ORIGINS={origin!r}: {expected}")
        return self

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Origins of web pages that may use the API, in the form that browsers send."""
        given = (each.strip().lower().rstrip("/") for each in self.cors_origins.split(","))
        return tuple(each for each in given if each)

    @property
    def sends_keys_in_clear(self) -> bool:
        """True if API keys may cross a network without TLS."""
        return bool(self.keys) and self.tls_cert is None and not is_loopback(self.host)

    def _check_models(self) -> None:
        for name, directory in self.models.items():
            if not directory.is_dir():
                raise ConfigError(f"WEFT_MODEL={self.model}: {directory}, for {name!r}, is not a directory")
        if unknown := self._tool_formats_by_model.keys() - self.models.keys():
            raise ConfigError(f"WEFT_TOOL_FORMAT={self.tool_format}: no model is called {min(unknown)!r}")

    @property
    def models(self) -> dict[str, Path]:
        """Checkpoint directories by the name that clients put into `model`."""
        return read_models(self.model, self.model_name)

    @property
    def tool_formats(self) -> dict[str, str]:
        """The tool call format of each model."""
        usual = "auto" if self._tool_formats_by_model else self.tool_format
        return {name: self._tool_formats_by_model.get(name, usual) for name in self.models}

    @property
    def _tool_formats_by_model(self) -> dict[str, str]:
        if "=" not in self.tool_format:
            return {}
        pairs = (part.rpartition("=") for part in self.tool_format.split(","))
        return {name.strip(): chosen.strip() for name, _, chosen in pairs}
