"""`python -m draft_service`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from draft_service.settings import EMBEDDED_DRAFT_LAYERS, DraftSettings
from specdec import logs, serving, settings
from specdec.services import DRAFT
from specdec.v1 import draft_pb2_grpc


def main(arguments: Sequence[str]) -> None:
    """Runs the service with the given command line until a signal comes."""
    config = settings.load(DraftSettings, arguments)
    logs.configure("draft", config.log_level, config.log_format)
    # Only now: torch takes seconds to import, and a wrong flag need not wait for it.
    from draft_service.service import DraftServicer
    from specdec.lm.serve import serve

    servicer = DraftServicer(config.draft_top_n)
    keep_layers = config.keep_layers
    if config.model is None and keep_layers is None:
        keep_layers = list(EMBEDDED_DRAFT_LAYERS)
    serving.run(
        serve(
            config,
            service=DRAFT,
            servicer=servicer,
            register=lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(
                servicer, server
            ),
            keep_layers=keep_layers,
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
