"""`python -m verifier_service`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from specdec import logs, serving, settings
from specdec.services import VERIFIER
from specdec.v1 import verifier_pb2_grpc
from verifier_service.settings import VerifierSettings


def main(arguments: Sequence[str]) -> None:
    """Runs the service with the given command line until a signal comes."""
    config = settings.load(VerifierSettings, arguments)
    logs.configure("verifier", config.log_level, config.log_format)
    # Only now: torch takes seconds to import, and a wrong flag need not wait for it.
    from specdec.lm.serve import serve
    from verifier_service.service import VerifierServicer

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
