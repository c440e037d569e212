# Three images: --target gateway, draft or verifier. The gateway's has no PyTorch. No weights are
# inside but the small default draft, which is part of the package; models are kept in the volume
# /cache. Nothing else is written but /tmp, so that the root may be read-only.
#
# The digest is what the tag named when it was last looked up. To move on:
#   docker buildx imagetools inspect python:3.11-slim-bookworm
FROM python:3.11-slim-bookworm@sha256:b18992999dbe963a45a8a4da40ac2b1975be1a776d939d098c647482bcad5cba AS python

FROM python AS venv
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /src
# Dependencies come first, so that a change of the source leaves their layer as it is.
COPY pyproject.toml constraints.txt LICENSE ./
RUN mkdir specdec draft_service verifier_service gateway

FROM scratch AS source
COPY specdec /specdec
COPY draft_service /draft_service
COPY verifier_service /verifier_service
COPY gateway /gateway

FROM venv AS gateway-venv
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt ".[gateway]"
COPY --from=source / ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --force-reinstall .

FROM venv AS model-venv
# Where PyTorch comes from: its index of wheels for the CPU, or for a certain CUDA. If it is left
# out, from where all else comes, which on x86-64 is a build for CUDA.
ARG TORCH_INDEX_URL=
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ -n "$TORCH_INDEX_URL" ]; then \
        pip install --constraint constraints.txt --index-url "$TORCH_INDEX_URL" torch; \
    fi \
    && pip install --constraint constraints.txt ".[draft,verifier]"
COPY --from=source / ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --force-reinstall .

FROM python AS runtime
# The volume takes over the owner of the folder.
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin specdec \
    && install --directory --owner=10001 --group=10001 /cache
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
# A number, so that Kubernetes can tell that it is not root.
USER 10001:10001

FROM runtime AS gateway
COPY --from=gateway-venv /opt/venv /opt/venv
EXPOSE 50051
ENTRYPOINT ["specdec", "gateway"]

FROM runtime AS model
COPY --from=model-venv /opt/venv /opt/venv
ENV HF_HOME=/cache/huggingface \
    SPECDEC_CACHE_DIR=/cache/specdec \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME ["/cache"]

FROM model AS draft
EXPOSE 50052
ENTRYPOINT ["specdec", "draft"]

FROM model AS verifier
EXPOSE 50053
ENTRYPOINT ["specdec", "verifier"]
