"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from specdec.services import DRAFT, GATEWAY, VERIFIER
from specdec.sessions import MAX_DRAFT_TOPK, MAX_RUN_AHEAD
from specdec.settings import Addresses, ServiceSettings
from specdec.tls import missing


class GatewaySettings(ServiceSettings):
    """Runs the gateway: the public Generate call."""

    model_config = SettingsConfigDict(
        env_prefix="SPECDEC_GATEWAY_", cli_prog_name="specdec gateway"
    )

    port: int = Field(
        GATEWAY.port, ge=0, le=65535, description="port to listen on; 0 picks a free one"
    )
    verifier_address: Addresses = Field(
        [f"127.0.0.1:{VERIFIER.port}"],
        min_length=1,
        description="host:port of the verifier; several with commas between them; dns:host:port "
        "for every address of a name",
    )
    draft_address: Addresses = Field(
        [f"127.0.0.1:{DRAFT.port}"],
        description="the same of the draft; empty for plain decoding only",
    )
    draft_wait_seconds: float = Field(
        1.0, ge=0.0, description="wait for a proposal before the round goes on without one"
    )
    draft_patience_seconds: float = Field(
        5.0, gt=0.0, description="wait for a proposal before the generation gives the draft up"
    )
    peer_silence_seconds: float = Field(
        5.0,
        ge=1.0,
        description="silence of a verifier or draft after which it is asked for a sign of life, "
        "and the wait for that",
    )
    failover_seconds: float = Field(
        30.0, ge=0.0, description="look for another verifier when one fails in a generation"
    )
    peer_tls_ca: Path | None = Field(
        None,
        description="PEM file of CAs: verifier and draft are spoken to by TLS, and must have a "
        "certificate of one of them; plaintext if left out",
    )
    peer_tls_cert: Path | None = Field(
        None, description="PEM file with the certificate that is shown to verifier and draft"
    )
    peer_tls_key: Path | None = Field(
        None, description="PEM file with the private key of peer_tls_cert"
    )
    peer_tls_name: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="what the certificates of verifier and draft must be for; the host of the "
        "address if left out",
    )
    keys_file: Path | None = Field(
        None, description="YAML file of hashed API keys and their limits; without it all may call"
    )
    max_sessions: int = Field(
        256, ge=1, description="most samples of all calls that are generated at once"
    )
    max_session_tokens: int | None = Field(
        None,
        ge=2,
        description="most tokens of what is generated at once: prompts, and what may follow them",
    )
    max_queued: int = Field(
        256, ge=0, description="most calls that wait for a session; others are refused at once"
    )
    queue_seconds: float = Field(
        30.0, gt=0.0, description="how long a call waits for a session before it is refused"
    )
    max_prompt_bytes: int = Field(
        4 << 20, ge=1, description="most bytes of a prompt that is text or a conversation"
    )
    temperature: float = Field(
        1.0, ge=0.0, le=100.0, description="temperature of requests that name none"
    )
    max_new_tokens: int = Field(256, ge=1, description="token limit of requests that name none")
    speculation: bool = Field(True, description="whether requests that do not say so draft")
    num_draft_tokens: int = Field(
        15, ge=0, description="most drafted tokens a round, of requests that name no number"
    )
    draft_topk: int = Field(
        4,
        ge=1,
        le=MAX_DRAFT_TOPK,
        description="most drafted tokens that follow one and the same token, of requests that name "
        "no number",
    )
    adaptive: bool = Field(
        True, description="whether fewer tokens are drafted, or none, where more would not pay"
    )
    run_ahead: int = Field(
        0,
        ge=0,
        le=MAX_RUN_AHEAD,
        description="for how many verdicts the draft prepares the next proposal, of requests that "
        "name no number",
    )
    max_num_draft_tokens: int = Field(
        32, ge=0, description="most drafted tokens a round that a request may ask for"
    )
    acceptance_rule: Literal["rejection", "block", "coupled"] = Field(
        "coupled", description="acceptance rule of requests that name none"
    )

    @model_validator(mode="after")
    def _peer_tls_is_whole(self) -> Self:
        fault = missing("peer_tls_", cert=self.peer_tls_cert, key=self.peer_tls_key)
        if (
            fault is None
            and self.peer_tls_ca is None
            and (self.peer_tls_cert or self.peer_tls_name)
        ):
            fault = "peer_tls_ca is needed too: without it there is no TLS with verifier and draft"
        if fault is not None:
            raise ValueError(fault)
        return self
