"""What docs/deployment.md shows is there, and works as far as no cluster is needed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from specdec.lm.attention import KVStore
from specdec.lm.pages import PAGE_SIZE
from tests.manifest_checks import faults
from tests.manifests import ADDITIONS, KUBECTL, KUSTOMIZE, OVERLAYS, ROOT, documents_of, helm

GUIDE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")


def block(first_line: str) -> str:
    """The YAML of the guide that begins with this line."""
    (found,) = re.findall(rf"```yaml\n{re.escape(first_line)}\n(.*?)```", GUIDE, re.DOTALL)
    return str(found)


def own_overlay() -> str:
    return block("# my-specdec/kustomization.yaml, beside deploy/")


def render(kustomization: str, folder: Path) -> list[str]:
    """The faults of what an overlay beside deploy/ makes, less those of images elsewhere."""
    (folder / "deploy").symlink_to(ROOT / "deploy")
    mine = folder / "my-specdec"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(kustomization)
    result = subprocess.run(
        [KUBECTL, "kustomize", mine], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "image: specdec/" not in result.stdout
    assert result.stdout.count("value: Qwen") == 0
    assert "verifier: Qwen/Qwen2.5-32B-Instruct" in result.stdout
    found = faults(documents_of(result.stdout))
    return [fault for fault in found if "image registry.example.com/specdec/" not in fault]


def test_own_overlay_of_the_guide_is_valid(tmp_path: Path) -> None:
    assert render(own_overlay(), tmp_path) == []


def test_own_overlay_with_a_misspelt_setting_is_not(tmp_path: Path) -> None:
    broken = own_overlay().replace("_MAX_SESSION_TOKENS", "_MAX_SESION_TOKENS")
    assert any("is no setting" in fault for fault in render(broken, tmp_path))


def test_patches_of_the_guide_for_a_group_of_pods_are_valid(tmp_path: Path) -> None:
    overlay = own_overlay().replace("overlays/multi-replica", "overlays/tensor-parallel")
    (rest, _, patches) = overlay.partition("patches:\n")
    assert patches
    more = block("# patches of a LeaderWorkerSet").replace("patches:\n", "")
    assert render(f"{rest}patches:\n{more}{patches}", tmp_path) == []


def test_own_values_of_the_guide_are_valid() -> None:
    pytest.importorskip("helm_python")
    found = faults(helm("multi-replica", yaml.safe_load(block("# my-values.yaml"))))
    assert [fault for fault in found if "image registry.example.com/specdec/" not in fault] == []


def test_guide_and_tests_have_every_overlay_and_component() -> None:
    overlays = {path.parent.name for path in (KUSTOMIZE / "overlays").glob("*/kustomization.yaml")}
    assert overlays == set(OVERLAYS)
    components = {p.parent.name for p in (KUSTOMIZE / "components").glob("*/kustomization.yaml")}
    text = "".join(p.read_text() for p in (KUSTOMIZE / "overlays").glob("*/kustomization.yaml"))
    within = set(re.findall(r"components/([\w-]+)", text))
    assert components == within | {name for names in ADDITIONS for name in names}
    for name in overlays | components:
        assert f"`{name}`" in GUIDE


def test_files_that_the_guide_names_are_there() -> None:
    named = re.findall(
        r"(?:-f|-k|kustomize|install specdec) ([\w./-]+/[\w.-]+|[\w-]+\.[\w.]+yml)", GUIDE
    )
    assert len(named) >= 6
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", GUIDE)
    for path in (*(ROOT / name for name in named), *(ROOT / "docs" / name for name in links)):
        assert path.exists(), path


def test_sizes_of_the_guide_are_those_of_the_cache() -> None:
    mebibyte = 1024**2
    assert PAGE_SIZE == 16
    target = KVStore.bytes_per_page([(8, 128)] * 80, torch.bfloat16)
    draft = KVStore.bytes_per_page([(2, 128)] * 28, torch.bfloat16)
    assert "| of a page of 16 tokens | 5 MiB | 448 KiB |" in GUIDE
    assert (target, draft) == (5 * mebibyte, 448 * 1024)
    assert "| 320 KiB | 28 KiB |" in GUIDE
    assert (target // 16, draft // 16) == (320 * 1024, 28 * 1024)
