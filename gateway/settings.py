"""Settings of the gateway."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.services import DRAFT, GATEWAY, VERIFIER
from specdec.sessions import MAX_DRAFT_TOPK, MAX_RUN_AHEAD
from specdec.settings import ServiceSettings


class GatewaySettings(ServiceSettings):
    """Runs the gateway: the public Generate call."""

    model_config = SettingsConfigDict(
        env_prefix="SPECDEC_GATEWAY_", cli_prog_name="specdec gateway"
    )

    port: int = Field(
        GATEWAY.port, ge=0, le=65535, description="port to listen on; 0 picks a free one"
    )
    verifier_address: str = Field(
        f"127.0.0.1:{VERIFIER.port}", description="host:port of the verifier"
    )
    draft_address: str = Field(
        f"127.0.0.1:{DRAFT.port}",
        description="host:port of the draft; empty for plain decoding only",
    )
    draft_patience_seconds: float = Field(
        5.0, gt=0.0, description="wait for a proposal before the generation goes on without draft"
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
