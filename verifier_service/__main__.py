"""`python -m verifier_service`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec import logs, serving, settings
from specdec.lm.serve import serve
from specdec.lm.settings import ModelServiceSettings
from specdec.services import VERIFIER
from specdec.v1 import verifier_pb2_grpc
from verifier_service.service import VerifierServicer


class VerifierSettings(ModelServiceSettings):
    """Runs the verifier service: the target model."""

    model_config = SettingsConfigDict(
        env_prefix="SPECDEC_VERIFIER_", cli_prog_name="specdec verifier"
    )

    port: int = Field(
        VERIFIER.port, ge=0, le=65535, description="port to listen on; 0 picks a free one"
    )


def main(arguments: Sequence[str]) -> None:
    """Runs the service with the given command line until a signal comes."""
    config = settings.load(VerifierSettings, arguments)
    logs.configure("verifier", config.log_level, config.log_format)
    servicer = VerifierServicer()
    serving.run(
        serve(
            config,
            service=VERIFIER,
            servicer=servicer,
            register=lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(
                servicer, server
            ),
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
