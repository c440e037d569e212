"""Runs the target alone and logs what it writes."""

from __future__ import annotations

import dataclasses
import secrets
import statistics
import time
from collections.abc import Callable, Sequence

import grpc

from specdec.bench.load import Call, send
from specdec.bench.prompts import Prompt
from specdec.bench.sweep import PLAIN, Workload
from specdec.bench.target_log import Header, Output, TargetLog
from specdec.v1 import (
    common_pb2,
    gateway_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)

_INFO_SECONDS = 10.0
_WARM_UP_TOKENS = 8


async def target_info(channel: grpc.aio.Channel) -> common_pb2.ModelInfo:
    """What the verifier service at a channel says of its model.

    Raises:
        grpc.aio.AioRpcError: it did not answer.
    """
    stub = verifier_pb2_grpc.VerifierServiceStub(channel)
    request = verifier_pb2.VerifierServiceGetModelInfoRequest()
    response = await stub.GetModelInfo(request, timeout=_INFO_SECONDS)
    return response.model_info


def empty_log(info: common_pb2.ModelInfo, workload: Workload) -> TargetLog:
    """A log that outputs of this target under this workload can be added to."""
    return TargetLog(
        Header(
            model_id=info.model_id,
            tokenizer_sha256=info.tokenizer_sha256,
            effective_vocab_size=info.effective_vocab_size,
            temperature=workload.temperature,
            seed=workload.seed,
            stop_token_ids=() if workload.ignore_eos else tuple(sorted(info.eos_token_ids)),
        )
    )


async def record(
    channel: grpc.aio.Channel,
    prompts: Sequence[Prompt],
    workload: Workload,
    max_context_length: int,
    log: TargetLog,
    *,
    duration: float,
    timeout: float,
    done: Callable[[Call], None] = lambda _: None,
) -> None:
    """Decodes plainly, one prompt after the other, and appends to the log.

    Before, a short request warms the services up.

    Args:
        channel: to the gateway.
        prompts: what to send.
        workload: how. Its acceptance rule counts as COUPLED: with that what the target writes does
            not depend on a draft.
        max_context_length: that of the target.
        log: filled as outputs end, so that what is there survives a cancellation.
        duration: seconds after which no further prompt is sent.
        timeout: seconds after which a request fails.
        done: told of every call that has ended. Failed ones have an error and are not logged.

    Raises:
        grpc.aio.AioRpcError: no request was answered.
    """
    coupled = common_pb2.ACCEPTANCE_RULE_COUPLED
    workload = dataclasses.replace(workload, acceptance_rule=coupled)
    for prompt in prompts[:1]:
        short = dataclasses.replace(workload, max_new_tokens=_WARM_UP_TOKENS)
        await send(
            channel, short.request(prompt, PLAIN, secrets.token_hex(8)), Call("", ""), timeout
        )
    begun = time.monotonic()
    error: grpc.aio.AioRpcError | None = None
    salt = secrets.token_hex(8)
    for prompt in prompts:
        if time.monotonic() - begun > duration:
            break
        call = Call(prompt.kind, prompt.id)
        request = workload.request(prompt, PLAIN, salt)
        try:
            prompt_token_ids = await _tokenized(channel, prompt, workload, salt, timeout)
        except grpc.aio.AioRpcError as failure:
            call.error = failure
        else:
            # By its token ids, so that what is measured is plain decoding and nothing else.
            request.token_ids.ids.extend(prompt_token_ids)
            await send(channel, request, call, timeout)
        if call.ok:
            room = min(workload.max_new_tokens, max_context_length - len(prompt_token_ids))
            log.outputs.append(_output(call, prompt_token_ids, room))
        error = call.error or error
        done(call)
    if error is not None and not log.outputs:
        raise error


async def _tokenized(
    channel: grpc.aio.Channel, prompt: Prompt, workload: Workload, salt: str, timeout: float
) -> list[int]:
    """The prompt as the target reads it: the gateway tells it with the log-probabilities."""
    request = dataclasses.replace(workload, max_new_tokens=1).request(prompt, PLAIN, salt)
    request.logprobs.prompt = True
    token_ids: list[int] = []
    stream = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=timeout)
    try:
        async for response in stream:
            token_ids += response.prompt_logprobs.token_ids
    finally:
        stream.cancel()
    return token_ids


def _output(
    call: Call,
    prompt_token_ids: Sequence[int],
    limit: int,
) -> Output:
    steps = call.inter_token
    return Output(
        kind=call.kind,
        prompt_id=call.prompt_id,
        prompt_token_ids=tuple(prompt_token_ids),
        token_ids=tuple(call.token_ids),
        limit=limit,
        step_ms=1000 * statistics.fmean(steps) if steps else None,
    )
