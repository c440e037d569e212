"""Settings of a service: flags, then environment variables, then a YAML file, then defaults.

Each service subclasses `ServiceSettings` with its own environment prefix. A key that no field has
is refused wherever it stands, because a misspelt setting that is silently ignored is worse than a
service that does not start.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliApp,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from specdec.logs import LogFormat
from specdec.tls import missing

Settings = TypeVar("Settings", bound="ServiceSettings")


def _split(names: object) -> object:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]
"""A list that is written with commas on the command line and in the environment."""


def _address(text: str) -> str:
    host, _, port = text.removeprefix("dns:").rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is neither host:port nor dns:host:port")
    return text


def _split_if_any(addresses: object) -> object:
    return [] if addresses == "" else _split(addresses)


Addresses = Annotated[
    list[Annotated[str, AfterValidator(_address)]], NoDecode, BeforeValidator(_split_if_any)
]
"""Replicas of a service, written likewise."""


class ServiceSettings(BaseSettings):
    """What every service can be told."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    config: Path | None = Field(None, description="YAML file with settings by their field names")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all interfaces")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    grace_seconds: float = Field(
        10.0, ge=0.0, description="how long running calls may go on after SIGTERM"
    )
    max_connection_age_seconds: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="age at which a connection takes no more calls, so that its client connects "
        "anew, perhaps to another replica; unlimited if left out",
    )
    max_connection_age_grace_seconds: Annotated[float, Field(gt=0.0)] | None = Field(
        None,
        description="how long the calls of an aged connection may go on; until they end if left "
        "out",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe events that are logged"
    )
    log_format: LogFormat = Field(
        "auto", description="console lines, JSON lines, or by whether stderr is a terminal"
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate that is shown to clients, and those between it "
        "and its CA; plaintext if left out",
    )
    tls_key: Path | None = Field(None, description="PEM file with the private key of tls_cert")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of CAs: clients must then show a certificate of one of them"
    )
    tls_client_names: Names = Field(
        [],
        description="the only clients that may call, by a DNS name or URI or the common name of "
        "their certificate; all of tls_client_ca if left out",
    )
    health_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="port for health checks alone, always plaintext, for probes that cannot speak "
        "TLS; none if left out",
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        fault = missing("tls_", cert=self.tls_cert, key=self.tls_key)
        if fault is None and self.tls_client_ca is not None and self.tls_cert is None:
            fault = "tls_client_ca needs tls_cert and tls_key too: there is no TLS without them"
        if fault is None and self.tls_client_names and self.tls_client_ca is None:
            fault = "tls_client_names needs tls_client_ca too: without it no client has a name"
        if fault is None and "" in self.tls_client_names:
            fault = "tls_client_names has an empty name, which no client has: leave it out"
        if fault is None and self.health_port is not None and self.health_port == self.port:
            fault = f"health_port and port are both {self.port}: choose another for one of them"
        if fault is not None:
            raise ValueError(fault)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, _ConfigFile(settings_cls))


class _ConfigFile(PydanticBaseSettingsSource):
    """The YAML file that a source of higher priority named in `config`."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        if not Path(path).is_file():
            raise ValueError(f"config: there is no file {str(path)!r}")
        try:
            return YamlConfigSettingsSource(self.settings_cls, yaml_file=Path(path))()
        except (yaml.YAMLError, TypeError, ValueError) as error:
            cause = " ".join(str(error).split())
            raise ValueError(f"config: {path} is no YAML mapping of settings: {cause}") from error


def _refuse_unknown_environment(settings_class: type[ServiceSettings]) -> None:
    prefix = settings_class.model_config["env_prefix"]
    known = {f"{prefix}{name}".upper() for name in settings_class.model_fields}
    for name in os.environ:
        if name.upper().startswith(prefix) and name.upper() not in known:
            close = difflib.get_close_matches(name.upper(), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"environment variable {name} is no setting of this service{hint}")


def _line(error: dict[str, Any]) -> str:
    """What a validation says. One that concerns several settings names them itself."""
    place, message = ".".join(map(str, error["loc"])), str(error["msg"])
    return f"{place}: {message}" if place else message.removeprefix("Value error, ")


def load(settings_class: type[Settings], arguments: Sequence[str]) -> Settings:
    """Reads the settings of a service.

    Raises:
        SystemExit: a setting is wrong; one line for each on standard error says which and why.
    """
    try:
        _refuse_unknown_environment(settings_class)
        return CliApp.run(settings_class, cli_args=list(arguments), cli_show_env_vars=True)
    except ValidationError as error:
        lines = [_line(dict(e)) for e in error.errors()]
    except (SettingsError, OSError, ValueError) as error:
        lines = [str(error)]
    raise SystemExit("\n".join(f"error: {line}" for line in lines))
