"""A client that stops reading holds up its own generation and nothing else."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from specdec.v1 import gateway_pb2, gateway_pb2_grpc
from tests.stack import Result, pair

SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0))
"""Of the client: so much is sent to it before it reads."""


@pytest.mark.slow
async def test_a_generation_waits_for_its_reader_in_bounded_memory(
    target_folder: Path, draft_folder: Path
) -> None:
    async with pair(target_folder, draft_folder) as stack:
        assert stack.verifier.runtime is not None
        request = stack.gateway.request(
            [5, 6, 7],
            **{"n": 2, "seed": 4, "max_new_tokens": 480, "ignore_eos": True},  # type: ignore[arg-type]
            # Long messages: together far more than the buffers on the way hold.
            logprobs=gateway_pb2.LogprobsParams(num_top=20),
        )
        undisturbed = await stack.gateway.send_for_samples(request)
        async with grpc.aio.insecure_channel(stack.gateway.address, SMALL_WINDOW) as channel:
            call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            await call.initial_metadata()
            # Others are served while it does not read, and go through as many rounds.
            for _ in range(2):
                other = await stack.gateway.send_for_samples(request)
                assert [r.token_ids for r in other] == [r.token_ids for r in undisturbed]
            assert stack.verifier.runtime.num_sessions == 2, "nobody has read, and it has ended"
            results = [Result(), Result()]
            async for response in call:
                results[response.index].token_ids += response.chunk.token_ids
            assert [r.token_ids for r in results] == [r.token_ids for r in undisturbed]
