"""Settings of the draft service. Free of torch, so that `--help` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import CliToggleFlag, SettingsConfigDict

from specdec.lm.settings import ModelServiceSettings
from specdec.services import DRAFT
from specdec.settings import Names

DEFAULT_DRAFT = Path(__file__).parent / "default_draft"
"""The draft for the default target: see the model card in it."""


class DraftSettings(ModelServiceSettings):
    """Runs the draft service: a small model, or something simpler, that proposes tokens."""

    model_config = SettingsConfigDict(env_prefix="SPECDEC_DRAFT_", cli_prog_name="specdec draft")

    port: int = Field(
        DRAFT.port, ge=0, le=65535, description="port to listen on; 0 picks a free one"
    )
    keep_layers: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="indices of the decoder layers to keep; all if left out"
    )
    draft_top_n: int = Field(
        64, ge=1, description="most tokens that the distribution sent with a drafted token keeps"
    )
    base: str | None = Field(
        None,
        description="hub id or folder of the model that a draft was distilled from, if it is not "
        "where it was then",
    )
    target_tokenizer: str | None = Field(
        None,
        description="hub id, folder or GGUF file of the target, for a draft model that has another "
        "tokenizer: what it drafts is translated by way of the text",
    )
    drafters: Annotated[Names, Field(min_length=1)] = Field(
        ["lookup", "model"],
        description="what drafts, the preferred first: model is a language model, lookup and "
        "suffix copy from prompt and output",
    )
    min_match: int = Field(
        3,
        ge=1,
        le=64,
        description="of several drafters, one that copies is preferred to the next if so many of "
        "the last tokens occurred before what it copies",
    )
    remember_outputs: CliToggleFlag[bool] = Field(
        False,
        description="whether suffix also copies from past outputs of sessions with the same "
        "prefix_cache.salt",
    )
    remembered_tokens: int = Field(
        200_000,
        ge=1000,
        description="most tokens of past outputs that are remembered; the oldest are dropped",
    )
