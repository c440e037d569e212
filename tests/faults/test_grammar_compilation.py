"""A grammar that takes long to compile at a model service stops nobody but its own session."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import grpc
import pytest

from specdec.errors import violations_of
from specdec.lm.grammar import GrammarCompiler, GrammarState
from specdec.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from tests.faults.guarded import until
from tests.stack import gateway, pair, verifier


async def test_other_sessions_go_on_while_a_grammar_is_compiled(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun = threading.Event(), threading.Event()
    start = GrammarCompiler.start

    def slow(self: GrammarCompiler, grammar: common_pb2.Grammar) -> GrammarState:
        begun.set()
        go_on.wait(20)
        return start(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "start", slow)
    async with pair(target_folder, None) as stack:
        form = common_pb2.Grammar(regex="[a-z]{3}")
        waiting = asyncio.create_task(stack.generate([5, 6], max_new_tokens=9, grammar=form))
        await asyncio.to_thread(begun.wait, 20)
        assert len((await stack.generate([5, 6], max_new_tokens=3, ignore_eos=True)).token_ids) == 3
        assert not waiting.done()
        go_on.set()
        assert len((await waiting).text) == 3


async def test_a_service_lives_on_after_a_grammar_that_it_cannot_compile(
    target_folder: Path,
) -> None:
    """Sent past the gateway, which would have refused it."""
    async with verifier(target_folder) as (address, servicer), gateway(address) as running:
        runtime = servicer.runtime
        assert runtime is not None
        opening = common_pb2.Open(
            session_id="s",
            round=1,
            base_length=1,
            prompt_token_ids=[5],
            sampling=common_pb2.Sampling(
                top_p=1.0, repetition_penalty=1.0, grammar=common_pb2.Grammar(regex="(")
            ),
            acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED,
            tokenizer_sha256=runtime.info.tokenizer_sha256,
        )
        async with grpc.aio.insecure_channel(address) as channel:
            call = verifier_pb2_grpc.VerifierServiceStub(channel).Verify()
            await call.write(verifier_pb2.VerifyRequest(open=opening))
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call.read()
        assert [v.field for v in violations_of(refusal.value)] == ["open.sampling.grammar"]
        after = await running.generate([5, 6], max_new_tokens=3, ignore_eos=True)
        assert len(after.token_ids) == 3
        await until(lambda: runtime.num_sessions == 0)
