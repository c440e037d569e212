"""Loads a causal language model and its tokenizer from a hub id, a folder or a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from specdec.lm import distilled
from specdec.lm.architecture import (
    ModelLoadError,
    check_architecture,
    check_weights,
    runnable,
)
from specdec.lm.model import CausalLM
from specdec.lm.settings import DType
from specdec.lm.tensor_parallel import LeadingLM, Team, check_plan, rank
from specdec.lm.tokenizer import TokenizerData


class LoadedModel(NamedTuple):
    """A model with what belongs to it."""

    model: CausalLM
    tokenizer: TokenizerData
    eos_token_ids: tuple[int, ...]
    max_context_length: int


class RawModel(NamedTuple):
    """A model as transformers reads it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    vocabulary: torch.Tensor | None
    """int64 [V'], the tokens of the head's rows, of a distilled draft."""


def load(
    model_id: str,
    *,
    device: str = "auto",
    dtype: DType = "auto",
    keep_layers: Sequence[int] | None = None,
    max_context_length: int | None = None,
    deterministic: bool = False,
    base: str | None = None,
    team: Team | None = None,
) -> LoadedModel:
    """Loads a model for inference.

    Args:
        model_id: a hub id, a folder, or a GGUF file.
        device: a torch device, or "auto": the first CUDA device if there is one, or the CPU.
        dtype: "auto" is the checkpoint's dtype on CUDA. On the CPU it is bfloat16 where the
            processor multiplies it natively, float32 elsewhere.
        keep_layers: the decoder layers to keep, by index, or None for all. A draft can be made
            from its own target in this way.
        max_context_length: a limit below the model's own, or None.
        deterministic: whether a row's logits must not depend on the other rows of a pass.
        base: where a distilled draft finds the model that it was distilled from, if that is not
            where it was.
        team: loads a shard of the model, as all processes of the team do; on its own device.

    Raises:
        ModelLoadError: the files are missing or broken, the architecture is not supported, or the
            tokenizer does not fit.
    """
    raw = read_model(model_id, device=device, dtype=dtype, base=base, team=team)
    if keep_layers is not None:
        _keep_layers(raw.model, keep_layers)
    return ready(
        raw,
        model_id,
        max_context_length=max_context_length,
        deterministic=deterministic,
        leads=team if rank() == 0 else None,
    )


def read_model(
    model_id: str,
    *,
    device: str = "auto",
    dtype: DType = "auto",
    base: str | None = None,
    team: Team | None = None,
) -> RawModel:
    """Reads a model's files, as `load` does.

    Raises:
        ModelLoadError: the files are missing or broken, or the architecture is not supported.
    """
    silence_transformers()
    draft = distilled.read(model_id, base)
    where = source_of(model_id)
    if draft is not None:
        if team is not None:
            raise ModelLoadError(f"{model_id!r} is a distilled draft: it runs in one process")
        # Configuration and tokenizer are the base's.
        where = {
            **source_of(distilled.source_of(draft.base.model_id)),
            "revision": draft.base.revision,
        }
    target_device = _device(device) if team is None else team.device
    try:
        config = AutoConfig.from_pretrained(**where)
        check_architecture(config)
        sharding: dict[str, Any] = {}
        vocabulary = None
        if team is not None:
            check_plan(config, team.size)
            sharding["distributed_config"] = DistributedConfig(tp_plan="auto")
        raw_tokenizer = AutoTokenizer.from_pretrained(**where)
        chosen_dtype = _dtype(dtype, target_device)
        if draft is not None:
            raw_model = draft.assemble(chosen_dtype)
            vocabulary = torch.tensor(draft.vocabulary)
        else:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **where,
                **sharding,
                dtype=chosen_dtype,
                output_loading_info=True,
                # Nothing is unpickled: what is pickled can be a program.
                use_safetensors=None if "gguf_file" in where else True,
            )
            raw_model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
            check_weights(model_id, raw_model, report)
    except ModelLoadError:
        raise
    except Exception as error:
        # The library raises dozens of types here; each means that these files do not load.
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(
            f"cannot load {model_id!r}: {cause[:400]} (check the name, the network and that the "
            "files are complete)"
        ) from error
    if team is None:
        raw_model.to(device=target_device)  # type: ignore[call-arg]
    raw_model.eval()
    return RawModel(raw_model, raw_tokenizer, vocabulary)


def ready(
    raw: RawModel,
    model_id: str,
    *,
    max_context_length: int | None = None,
    deterministic: bool = False,
    leads: Team | None = None,
) -> LoadedModel:
    """Makes a model ready for packed passes; what transformers made of it is used up.

    Args:
        raw: as it was read.
        model_id: what it was read from.
        max_context_length: as of `load`.
        deterministic: likewise.
        leads: the team that follows this process, if there is one.

    Raises:
        ModelLoadError: the architecture is not supported, or the tokenizer does not fit.
    """
    raw_model, raw_tokenizer, vocabulary = raw
    if not isinstance(raw_tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(f"{model_id!r}: its tokenizer has no form that can be served as JSON")
    tokenizer = TokenizerData.from_transformers(raw_tokenizer)
    embedding: Any = raw_model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    if tokenizer.effective_vocab_size > rows:
        raise ModelLoadError(
            f"{model_id!r}: its tokenizer has {tokenizer.effective_vocab_size} ids but the model "
            f"only {rows} embeddings: the files do not belong together"
        )
    own_limit = getattr(raw_model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (own_limit, max_context_length) if limit]
    if not limits:
        raise ModelLoadError(f"{model_id!r} states no context length: give --max-context-length")
    eos_token_ids = eos_token_ids_of(
        (raw_model.generation_config, raw_model.config), raw_tokenizer.eos_token_id
    )
    model = runnable(
        raw_model,
        tokenizer.effective_vocab_size,
        vocabulary=vocabulary,
        deterministic=deterministic,
    )
    if leads is not None:
        model = LeadingLM(model, leads)
    return LoadedModel(
        model,
        tokenizer,
        eos_token_ids,
        min(limits),
    )


def source_of(model_id: str) -> dict[str, Any]:
    """How transformers is told where the files are, and not to run code that is among them."""
    safe: dict[str, Any] = {"trust_remote_code": False}
    path = Path(model_id).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"there is no file {model_id!r}: check the path")
        name = path.name
        return {**safe, "pretrained_model_name_or_path": str(path.parent), "gguf_file": name}
    if path.exists():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"{model_id!r} has no config.json: give a model folder, a GGUF file or a hub id"
            )
        return {**safe, "pretrained_model_name_or_path": str(path)}
    if path.is_absolute() or model_id.startswith((".", "~")) or model_id.count("/") > 1:
        raise ModelLoadError(f"there is no file or folder {model_id!r}: check the path")
    return {**safe, "pretrained_model_name_or_path": model_id}


def silence_transformers() -> None:
    """Keeps the library's progress bars and advice out of the services' logs."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "cuda":
            # What this thread does without naming a device, such as recording graphs, is for it.
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ModelLoadError(f"device {name!r} cannot be used: {reason}") from error
    return device


def _dtype(name: DType, device: torch.device) -> torch.dtype | Literal["auto"]:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type != "cpu":
        return "auto"
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def _keep_layers(model: PreTrainedModel, keep: Sequence[int]) -> None:
    """Drops all decoder layers but those at the indices `keep`."""
    decoder = model.get_decoder()
    count = len(decoder.layers)
    if not keep or sorted(set(keep)) != list(keep) or keep[0] < 0 or keep[-1] >= count:
        raise ModelLoadError(
            f"keep_layers must be ascending indices from 0 to {count - 1}, got {list(keep)}"
        )
    decoder.layers = torch.nn.ModuleList([decoder.layers[index] for index in keep])
    for index, layer in enumerate(decoder.layers):
        # The index is the layer's slot in the KV cache.
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    config = model.config.get_text_config()
    config.num_hidden_layers = len(keep)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in keep]


def eos_token_ids_of(sources: Iterable[object], tokenizer_eos: int | None) -> tuple[int, ...]:
    """The tokens that end a generation, as configurations and the tokenizer name them."""
    found: set[int] = set()
    for source in sources:
        eos = getattr(source, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or ())
    if tokenizer_eos is not None:
        found.add(tokenizer_eos)
    return tuple(sorted(found))
