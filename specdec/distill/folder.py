"""The folder of a distilled draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec.distill.student import Student
from specdec.lm.distilled import PROJECTION, SECTION, WEIGHTS, Base, read_embedding, tensor_sha256


def base_of(target: PreTrainedModel, model_id: str) -> Base:
    """How a draft will find its target's embeddings.

    Raises:
        ModelLoadError: the target's files hold no such tensor, as a GGUF file does not.
    """
    embedding: Any = target.get_input_embeddings()
    name = next(name for name, module in target.named_modules() if module is embedding)
    revision = getattr(target.config, "_commit_hash", None)
    base = Base(model_id, revision, f"{name}.weight", "")
    return base._replace(embedding_sha256=tensor_sha256(read_embedding(base)))


def save(student: Student, base: Base, folder: Path) -> None:
    """Writes what `specdec draft --model` loads: weights in bfloat16, config with base and ids."""
    # Where the target lay on this machine is nobody else's business.
    config = {k: v for k, v in student.config.to_dict().items() if not k.endswith("name_or_path")}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    prefix = names[id(decoder)]
    weights = {f"{prefix}.{name}": value for name, value in student.decoder.state_dict().items()}
    weights[f"{names[id(head)]}.weight"] = student.head
    if student.projection is not None:
        weights[PROJECTION] = student.projection.weight
    weights.pop(f"{names[id(embedding)]}.weight", None)
    folder.mkdir(parents=True, exist_ok=True)
    halved = {
        name: value.detach().to(torch.bfloat16).cpu().contiguous()
        for name, value in weights.items()
    }
    section = {"base": base._asdict(), "vocabulary": student.vocabulary.tolist()}
    document = json.dumps({**config, "dtype": "bfloat16", SECTION: section}, sort_keys=True)
    new_config, new_weights = folder / "config.partial", folder / "weights.partial"
    new_config.write_text(document + "\n", encoding="utf-8")
    save_file(halved, new_weights, metadata={"format": "pt"})
    # safetensors makes its files private to the user.
    new_weights.chmod(new_config.stat().st_mode)
    new_weights.replace(folder / WEIGHTS)
    new_config.replace(folder / "config.json")
