"""`python -m verifier_service`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from specdec import logs, serving, settings, wire
from specdec.services import VERIFIER
from specdec.v1 import verifier_pb2
from verifier_service.settings import VerifierSettings


def main(arguments: Sequence[str]) -> None:
    """Runs the service with the given command line until a signal comes."""
    config = settings.load(VerifierSettings, arguments)
    logs.configure("verifier", config.log_level, config.log_format)
    # Only now: torch takes seconds to import, and a wrong flag need not wait for it.
    from specdec.lm.serve import serve
    from verifier_service.service import VerifierServicer

    servicer = VerifierServicer(config.max_sessions)
    serving.run(
        serve(
            config,
            service=VERIFIER,
            servicer=servicer,
            register=lambda server: wire.register(
                server, servicer, verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]
            ),
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
