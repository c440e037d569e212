"""Structured logs: one line an event, for people on a terminal and as JSON elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import grpc
import structlog

LogFormat = Literal["auto", "console", "json"]


def configure(service: str, level: str, log_format: LogFormat) -> None:
    """Sends all logs of this process, also those of libraries, to standard error.

    Args:
        service: the name that every line carries.
        level: a level's name of the standard library, in lower case.
        log_format: "auto" is "console" on a terminal and "json" elsewhere.
    """
    if log_format == "auto":
        log_format = "console" if sys.stderr.isatty() else "json"
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[structlog.types.Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # The default shows local variables, and prompts are not for logs.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
        if log_format == "console"
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def request_id_of(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """The id that the caller gave the call in its metadata, for the logs of all services."""
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id" and isinstance(value, str):
            return value[:128]
    return None
