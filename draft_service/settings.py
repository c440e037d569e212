"""Settings of the draft service. Free of torch, so that `--help` answers at once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specdec.lm.settings import ModelServiceSettings
from specdec.services import DRAFT

# The embedded default draft is the embedded target without these of its 30 layers. They were
# dropped one by one, each time the one whose loss cost the least agreement with the full model's
# argmax on its own greedy answers; at 24 layers 53% agreed.
_DROPPED_LAYERS = (3, 12, 14, 17, 23, 25)
EMBEDDED_DRAFT_LAYERS = tuple(i for i in range(30) if i not in _DROPPED_LAYERS)


class DraftSettings(ModelServiceSettings):
    """Runs the draft service: a small model that proposes tokens."""

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
