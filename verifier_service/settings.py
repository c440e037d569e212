"""Settings of the verifier service. Free of torch, so that `--help` answers at once."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.lm.settings import ModelServiceSettings
from specdec.services import VERIFIER


class VerifierSettings(ModelServiceSettings):
    """Runs the verifier service: the target model."""

    model_config = SettingsConfigDict(
        env_prefix="SPECDEC_VERIFIER_", cli_prog_name="specdec verifier"
    )

    port: int = Field(
        VERIFIER.port, ge=0, le=65535, description="port to listen on; 0 picks a free one"
    )
