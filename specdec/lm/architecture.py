"""Refuses models that speculative decoding cannot be exact with, before they serve anyone."""

from __future__ import annotations

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from specdec.lm.batch import Segment
from specdec.lm.model import CausalLM

_SUPPORTED = "a model with causal attention, such as the Llama, Qwen and Mistral families"
# What a layer may be for its state to be rolled back to any earlier length.
_REWINDABLE_LAYERS = {"full_attention", "sliding_attention"}
# Their rotation depends on the longest sequence of a pass, so that neighbours would be felt.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_TRIAL_TOKENS = tuple(range(1, 21))


class ModelLoadError(Exception):
    """A model cannot be loaded. The message is one line that says what to do."""


def check_architecture(config: PreTrainedConfig) -> None:
    """Refuses what is not a decoder-only model whose state can be rolled back.

    Raises:
        ModelLoadError: names the architecture and why it is refused.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise ModelLoadError(_not_a_decoder(config))
    layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if layer_types - _REWINDABLE_LAYERS:
        raise ModelLoadError(_cannot_rewind(config))
    if kinds := _rope_types(config) & _BATCH_DEPENDENT_ROPE:
        raise ModelLoadError(
            f"architecture {config.model_type!r} is not supported with rope_type "
            f"{', '.join(sorted(kinds))}: what it computes for a sequence "
            "depends on its neighbours; choose a checkpoint with static RoPE scaling"
        )


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotation; some architectures have several, by kind of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(each.get("rope_type")) for each in (parameters, *nested)}


def _not_a_decoder(config: PreTrainedConfig) -> str:
    return (
        f"architecture {config.model_type!r} is not supported: it is no decoder-only language "
        f"model; choose {_SUPPORTED}"
    )


def runnable(
    model: PreTrainedModel,
    effective_vocab_size: int,
    *,
    vocabulary: torch.Tensor | None = None,
    deterministic: bool = False,
) -> CausalLM:
    """Makes a model ready for packed passes, and tries it out. `CausalLM` has the arguments.

    Raises:
        ModelLoadError: the runtime does not give what transformers itself gives, also after a
            rollback. No attribute of an architecture says that.
    """
    config = model.config
    tokens = [token * 7919 % effective_vocab_size for token in _TRIAL_TOKENS]
    try:
        expected = _reference(model, tokens)
        ready = CausalLM(
            model, effective_vocab_size, vocabulary=vocabulary, deterministic=deterministic
        )
        found = _trial(ready, tokens)
        if vocabulary is not None:
            found = found[:, vocabulary.to(found.device)]
    except Exception as error:
        cause = " ".join(str(error).split())
        raise ModelLoadError(
            f"architecture {config.model_type!r} is not supported: a trial run failed "
            f"({type(error).__name__}: {cause[:200]}); choose {_SUPPORTED}"
        ) from error
    # Rounding is far below this, another context far above.
    limit = 0.01 if found.dtype == torch.float32 else 0.3
    expected = expected[:, : found.shape[1]]
    if (found.float() - expected).norm() > limit * expected.norm():
        raise ModelLoadError(
            f"architecture {config.model_type!r} is not supported: fed in pieces, with a rollback, "
            f"it does not compute what its own forward pass does; choose {_SUPPORTED}"
        )
    return ready


@torch.inference_mode()
def _reference(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """float32 [T, any vocabulary]: the logits after each token by the model's own forward pass."""
    input_ids = torch.tensor([tokens], device=model.device)
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits[0]
    return logits.float()


def _trial(model: CausalLM, tokens: list[int]) -> torch.Tensor:
    """The same by packed passes: a beginning, a wrong draft that is rolled back, then the rest."""
    model.allocate(4)
    pages = [3, 1]
    begun = model.forward([Segment(tokens[:5], 0, pages, 5)])
    model.forward([Segment(tokens[:3], 5, pages, 0), Segment(tokens[:2], 0, [2], 1)])
    rest = model.forward([Segment(tokens[5:], 5, pages, len(tokens) - 5)])
    return torch.cat([begun, rest])


def _cannot_rewind(config: PreTrainedConfig) -> str:
    return (
        f"architecture {config.model_type!r} is not supported: its state cannot be rolled back "
        f"when drafted tokens are rejected; choose {_SUPPORTED}"
    )


def check_weights(model_id: str, model: PreTrainedModel, report: dict[str, set[str]]) -> None:
    """Refuses a model whose files did not hold all of its weights, or that is no decoder.

    Args:
        model_id: what it was loaded from.
        model: as loaded.
        report: what transformers says of the loading.

    Raises:
        ModelLoadError: says what is missing.
    """
    # The library gives missing weights random values, and says so only in a warning.
    for key in ("missing_keys", "mismatched_keys"):
        if faulty := sorted(map(str, report[key])):
            raise ModelLoadError(
                f"cannot load {model_id!r}: {len(faulty)} weights are "
                f"{key.removesuffix('_keys')}, {faulty[0]} among them (check that the files are "
                "complete)"
            )
    if any(getattr(module, "is_causal", None) is False for module in model.modules()):
        raise ModelLoadError(_not_a_decoder(model.config))
