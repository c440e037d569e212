"""Settings that both model services have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field
from pydantic_settings import CliToggleFlag

from specdec.settings import ServiceSettings

DType = Literal["auto", "float32", "bfloat16", "float16"]


class ModelServiceSettings(ServiceSettings):
    """What a service that runs a model can be told, besides what every service can."""

    model: str | None = Field(
        None, description="hub id, folder or GGUF file; the embedded default if left out"
    )
    device: str = Field("auto", description="torch device, for example cpu, cuda or cuda:1")
    dtype: DType = Field("auto", description="what the weights are converted to")
    num_threads: Annotated[int, Field(ge=1)] | None = Field(
        None, description="cores that one operation may use; torch decides if left out"
    )
    max_context_length: Annotated[int, Field(ge=2)] | None = Field(
        None, description="most tokens of a session, if less than the model's own limit"
    )
    max_num_draft_tokens: int = Field(
        32, ge=0, le=256, description="most drafted tokens in one round"
    )
    kv_memory: Literal["auto"] | ByteSize = Field(
        "auto",
        description="memory for the KV cache, for example 4GiB; auto takes 80% of what is free on "
        "the GPU, or a quarter of what is free but at most 2 GiB on the CPU",
    )
    max_rows: int = Field(
        512,
        ge=16,
        description="token budget of a forward pass over all sessions; 32 if deterministic",
    )
    deterministic: CliToggleFlag[bool] = Field(
        False,
        description="whether greedy and COUPLED requests give the same tokens whatever runs beside "
        "them; slower",
    )
    max_sessions: int = Field(
        1024, ge=1, description="most sessions open at once; more are refused with RetryInfo"
    )
    stall_seconds: float = Field(
        300.0,
        gt=0.0,
        description="once loaded, a model that is at one pass for so long counts as dead: health "
        "says so, and its sessions end",
    )
