"""Settings come from flags, environment, file and defaults; what is wrong is said in a line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draft_service.settings import DraftSettings
from gateway.settings import GatewaySettings
from specdec.settings import ServiceSettings, load
from verifier_service.settings import VerifierSettings

PREFIX = "SPECDEC_GATEWAY_"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting comes from the environment that the tests were started in."""
    for name in os.environ:
        if name.upper().startswith("SPECDEC_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


def complaints(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a service says that is started so; argparse explains the usage before it."""
    with pytest.raises(SystemExit) as caught:
        load(GatewaySettings, arguments)
    code = caught.value.code
    assert code not in (0, None)
    # Python prints a text that a program exits with.
    said = (f"{code}\n" if isinstance(code, str) else "") + capsys.readouterr().err
    assert "Traceback" not in said
    return [line for line in said.splitlines() if "error: " in line]


def test_a_flag_is_before_the_environment_before_the_file_before_the_default(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file.write_text("max_new_tokens: 2\nnum_draft_tokens: 2\ntemperature: 0.2\n")
    monkeypatch.setenv(f"{PREFIX}MAX_NEW_TOKENS", "3")
    monkeypatch.setenv(f"{PREFIX}NUM_DRAFT_TOKENS", "3")
    settings = load(GatewaySettings, ["--config", str(config_file), "--max-new-tokens", "4"])
    assert settings.max_new_tokens == 4
    assert settings.num_draft_tokens == 3
    assert settings.temperature == 0.2
    assert settings.max_num_draft_tokens == GatewaySettings().max_num_draft_tokens == 32


def test_a_value_that_is_overridden_counts_even_if_it_is_the_default(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file.write_text("max_new_tokens: 2\nnum_draft_tokens: 2\n")
    monkeypatch.setenv(f"{PREFIX}NUM_DRAFT_TOKENS", "5")
    settings = load(GatewaySettings, ["--config", str(config_file), "--max-new-tokens", "256"])
    assert (settings.max_new_tokens, settings.num_draft_tokens) == (256, 5)


def test_the_environment_may_name_the_file(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file.write_text("acceptance_rule: block\n")
    monkeypatch.setenv(f"{PREFIX}CONFIG", str(config_file))
    assert load(GatewaySettings, []).acceptance_rule == "block"


def test_an_empty_file_sets_nothing(config_file: Path) -> None:
    config_file.write_text("# nothing yet\n")
    assert load(GatewaySettings, ["--config", str(config_file)]).max_new_tokens == 256


def test_each_service_listens_to_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_VERIFIER_PORT", "7001")
    monkeypatch.setenv("SPECDEC_DRAFT_PORT", "7002")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", "/nowhere")
    assert load(VerifierSettings, []).port == 7001
    assert load(DraftSettings, []).port == 7002
    assert load(GatewaySettings, []).port == 50051


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--prot", "1"], "--prot", id="unknown flag"),
        pytest.param(["--por", "1"], "--por", id="beginning of a flag"),
        pytest.param(["1"], "1", id="no flag"),
        pytest.param(["--port"], "--port", id="no value"),
        pytest.param(["--port", "http"], "port: Input should be a valid integer", id="no number"),
        pytest.param(["--port", "65536"], "port: Input should be less than", id="above the range"),
        pytest.param(["--port", "-1"], "port: Input should be greater than", id="below the range"),
        pytest.param(["--temperature", "nan"], "temperature: Input should be", id="not a number"),
        pytest.param(["--acceptance-rule", "best"], "'rejection', 'block' or", id="no choice"),
        pytest.param(["--config", "/no/file"], "there is no file '/no/file'", id="missing file"),
    ],
)
def test_a_wrong_flag_is_refused_with_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = complaints(arguments, capsys)
    assert expected in line


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PROT", "1", rf"environment variable {PREFIX}PROT .* did you mean {PREFIX}PORT\?"),
        ("TOP_P", "1", rf"environment variable {PREFIX}TOP_P is no setting"),
        ("PORT", "http", "port: Input should be a valid integer"),
        ("PORT", "", "port: Input should be a valid integer"),
        ("CONFIG", "/no/file", "there is no file '/no/file'"),
    ],
)
def test_a_wrong_environment_variable_is_refused_with_one_line(
    name: str,
    value: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(f"{PREFIX}{name}", value)
    (line,) = complaints([], capsys)
    assert re.search(expected, line)


def test_the_case_of_an_unknown_variable_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"{PREFIX}port".lower(), "7003")
    assert load(GatewaySettings, []).port == 7003
    monkeypatch.setenv(f"{PREFIX}prot".lower(), "7004")
    (line,) = complaints([], capsys)
    assert "specdec_gateway_prot" in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("prot: 1\n", "prot: ", id="unknown key"),
        pytest.param("gateway:\n  port: 1\n", "gateway: ", id="key that is a section"),
        pytest.param("port: 70000\n", "port: Input should be less than", id="out of range"),
        pytest.param("port: [1]\n", "port: Input should be a valid integer", id="wrong type"),
        pytest.param("port: [1\n", "config: ", id="not YAML"),
        pytest.param("- 1\n", "config: ", id="no mapping"),
        pytest.param("port\n", "config: ", id="only a word"),
        pytest.param(b"\x80", "config: ", id="no text"),
    ],
)
def test_a_wrong_file_is_refused_with_one_line(
    content: str | bytes, expected: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (line,) = complaints(["--config", str(config_file)], capsys)
    assert expected in line


def test_several_faults_have_a_line_each(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_text("temperature: hot\n")
    monkeypatch.setenv(f"{PREFIX}MAX_NEW_TOKENS", "0")
    lines = complaints(["--config", str(config_file), "--port", "x"], capsys)
    assert sorted(line.split(":")[1] for line in lines) == [
        " max_new_tokens",
        " port",
        " temperature",
    ]


@pytest.mark.parametrize("settings", [GatewaySettings, VerifierSettings, DraftSettings])
def test_help_explains_every_flag_and_its_variable(
    settings: type[ServiceSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(settings, ["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    prefix = settings.model_config["env_prefix"]
    for name, field in settings.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        # The flag, its description, its default, its variable, and no other flag between them.
        options = text.partition("options:")[2]
        (shown,) = re.findall(rf" {flag}(?:, --no-[\w-]+)? (?:(?! --).)*?\[env: (\w+)\]", options)
        assert shown == f"{prefix}{name}".upper()
        assert field.description
        assert field.description in text


def test_a_process_that_is_started_wrongly_exits_with_readable_lines() -> None:
    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gateway", *arguments],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    flag = run("--prot", "1")
    assert flag.returncode != 0
    assert flag.stderr.splitlines()[-1].endswith("error: unrecognized arguments: --prot 1")
    assert "Traceback" not in flag.stderr

    value = run("--port", "http", SPECDEC_GATEWAY_TEMPERATURE="-1")
    assert value.returncode != 0
    lines = value.stderr.splitlines()
    assert len(lines) == 2
    assert all(re.match(r"error: (port|temperature): Input should be ", line) for line in lines)
    assert flag.stdout == value.stdout == ""

    assert run("--help").returncode == 0
