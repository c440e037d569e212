"""benchmarks/gpu.py runs whole, in small, also on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import gpu


def test_every_measurement_is_made(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    gpu.main(["--small", "--json", str(file), "-k", "3", "--alpha", "0.5"])
    result = json.loads(file.read_text())
    assert (result["k"], result["alpha"]) == (3, 0.5)
    assert result["bandwidth_gb_s"] > 0
    batches = {str(batch) for batch in gpu.SMALL.batches}
    assert result["tokens_s"].keys() == batches
    assert all(rate > 0 for rates in result["tokens_s"].values() for rate in rates)
    for name in ("target", "draft"):
        found = result[name]
        for passes in (found["passes"], found["passes_unrecorded"]):
            assert passes.keys() == batches
            assert all(ms > 0 for pair in passes.values() for ms in pair)
        # Recorded passes are padded, so that they round in other places, and only there.
        assert 0 <= found["largest_relative_difference"] < 0.02
        assert found["recording_seconds"] > 0
        assert found["share_of_bandwidth"] > 0
    assert result["target"]["weights_gb"] > result["draft"]["weights_gb"] > 0
