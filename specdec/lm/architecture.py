"""Refuses models that speculative decoding cannot be exact with, before they serve anyone."""

from __future__ import annotations

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from specdec.lm.model import CausalLM

_SUPPORTED = "a model with causal attention, such as the Llama, Qwen and Mistral families"
# What a layer may be for its state to be rolled back to any earlier length.
_REWINDABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


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


def _not_a_decoder(config: PreTrainedConfig) -> str:
    return (
        f"architecture {config.model_type!r} is not supported: it is no decoder-only language "
        f"model; choose {_SUPPORTED}"
    )


def check_rollback(model: CausalLM, config: PreTrainedConfig) -> None:
    """Refuses a model that does not continue from a rolled-back cache as from a fresh one.

    It is tried out, because no attribute of an architecture says it. It is also the warm-up.
    """
    try:
        rolled_back, fresh = model.new_cache(), model.new_cache()
        model.forward(rolled_back, [0, 1, 2], 1)
        lengths = [rolled_back.length]
        rolled_back.truncate(1)
        lengths.append(rolled_back.length)
        after = model.forward(rolled_back, [3], 1).float()
        expected = model.forward(fresh, [0, 3], 1).float()
    except Exception as error:
        raise ModelLoadError(
            f"architecture {config.model_type!r} is not supported: a trial run failed "
            f"({type(error).__name__}: {str(error)[:200]}); choose {_SUPPORTED}"
        ) from error
    # Half-precision rounding is far below this, another context far above.
    if lengths != [3, 1] or (after - expected).norm() > 0.05 * expected.norm():
        raise ModelLoadError(_cannot_rewind(config))


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
