"""A GGUF file turned into a folder of safetensors that any loader opens at once.

The work is done in a child process (`python -m specdec.models.convert GGUF FOLDER NAME`): it keeps
the libraries' bars and warnings off the terminal and torch out of the caller.
"""

import importlib.util
import sys
from pathlib import Path

from specdec.models.child import ModelPullError, run_python
from specdec.models.download import Report

_PACKAGES = ("torch", "transformers", "accelerate", "gguf")
_STEPS = ("loading torch", "reading the tokenizer", "unpacking the weights", "saving")


def check_can_convert() -> None:
    """Raise `ModelPullError` if a package that the conversion needs is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelPullError(
            f"converting the model needs {', '.join(missing)}: install specdec[lm]"
        )


def convert_gguf(gguf: Path, folder: Path, name: str, work: Path, report: Report) -> None:
    """Write the model in `gguf`, its tokenizer and generation settings to the new `folder`.

    Args:
        gguf: The file to convert.
        folder: Made by this; incomplete if this raises.
        name: The name that the model's config gives itself.
        work: An existing folder for logs.
        report: Told of progress in steps.

    Raises:
        ModelPullError: The conversion failed; the text holds the library's reason.
    """

    def poll(step: str) -> None:
        if step in _STEPS:
            report(f"Converting: {step}", _STEPS.index(step), len(_STEPS))

    arguments = ["-m", "specdec.models.convert", str(gguf), str(folder), name]
    try:
        run_python(arguments, work, poll)
    except ModelPullError as error:
        raise ModelPullError(
            f"the model could not be converted ({error}): it takes 1 GB of memory and 400 MB of "
            "disk; if there is enough of both, try another version of transformers"
        ) from None
    report(f"Converting: {_STEPS[-1]}", len(_STEPS), len(_STEPS))


def _convert(gguf: Path, folder: Path, name: str) -> None:
    _announce("loading torch")
    import torch
    import transformers

    origin, file = str(gguf.parent), gguf.name
    _announce("reading the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(origin, gguf_file=file)
    _announce("unpacking the weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        origin,
        gguf_file=file,
        dtype=torch.bfloat16,
        # A model whose weights are left packed refuses to be saved.
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    _announce("saving")
    model.config._model_name_or_path = name
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    # safetensors makes its files private to the user; a cache may be shared.
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)


def _announce(step: str) -> None:
    print(step, flush=True)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
