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
from typing import Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliApp,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from specdec.logs import LogFormat

Settings = TypeVar("Settings", bound="ServiceSettings")


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
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe events that are logged"
    )
    log_format: LogFormat = Field(
        "auto", description="console lines, JSON lines, or by whether stderr is a terminal"
    )

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


def load(settings_class: type[Settings], arguments: Sequence[str]) -> Settings:
    """Reads the settings of a service.

    Raises:
        SystemExit: a setting is wrong; one line for each on standard error says which and why.
    """
    try:
        _refuse_unknown_environment(settings_class)
        return CliApp.run(settings_class, cli_args=list(arguments), cli_show_env_vars=True)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    except (SettingsError, OSError, ValueError) as error:
        lines = [str(error)]
    raise SystemExit("\n".join(f"error: {line}" for line in lines))
