# One image per service: SERVICE_EXTRA is draft, verifier or gateway. No weights are inside but the
# small default draft; they are kept in the volume /cache. The command line of the container is that
# of `specdec`.
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS build
ARG SERVICE_EXTRA
# Set it to take PyTorch from another index than pip's default one.
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
# Dependencies come first, so that a change of the source leaves their layer as it is.
COPY pyproject.toml constraints.txt LICENSE ./
RUN --mount=type=cache,target=/root/.cache/pip \
    test -n "$SERVICE_EXTRA" \
    && mkdir specdec draft_service verifier_service gateway \
    && pip install --constraint constraints.txt ".[$SERVICE_EXTRA]"
COPY specdec specdec
COPY draft_service draft_service
COPY verifier_service verifier_service
COPY gateway gateway
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --force-reinstall .

FROM python:${PYTHON_VERSION}-slim AS runtime
RUN useradd --uid 10001 --create-home --home-dir /cache --shell /usr/sbin/nologin specdec
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache/huggingface \
    SPECDEC_CACHE_DIR=/cache/specdec
VOLUME ["/cache"]
WORKDIR /cache
# A number, so that Kubernetes can tell that it is not root.
USER 10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["specdec"]
CMD ["--help"]
