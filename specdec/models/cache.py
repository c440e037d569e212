"""The folder in which pulled models are kept."""

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_TARGET_NAME = "SmolLM2-135M-Instruct"

_REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json")


class _XdgSettings(BaseSettings):
    """The XDG base directory of caches; an empty variable counts as unset, as XDG demands."""

    model_config = SettingsConfigDict(env_prefix="XDG_", env_ignore_empty=True, frozen=True)

    cache_home: Path = Field(default_factory=lambda: Path.home() / ".cache")


class CacheSettings(BaseSettings):
    """Where specdec keeps files that it can fetch again."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_", env_ignore_empty=True, frozen=True)

    cache_dir: Path = Field(
        default_factory=lambda: _XdgSettings().cache_home / "specdec",
        description="Folder of pulled models. Default: specdec in XDG_CACHE_HOME or in ~/.cache.",
    )

    @field_validator("cache_dir")
    @classmethod
    def _absolute(cls, folder: Path) -> Path:
        return folder.expanduser().absolute()


def default_target_path() -> Path:
    """The folder of the default target model, whether or not it has been pulled."""
    return CacheSettings().cache_dir / "models" / DEFAULT_TARGET_NAME


def is_pulled(folder: Path) -> bool:
    """Whether `folder` holds a complete model; pulled folders appear whole or not at all."""
    return all((folder / name).is_file() for name in _REQUIRED_FILES)
