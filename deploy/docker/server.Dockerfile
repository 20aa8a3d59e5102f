# syntax=docker/dockerfile:1
# kvtier serve. From the root of the repository:
#
#   docker build -f deploy/docker/server.Dockerfile -t kvtier .
#
# For CUDA: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130, and run it with --gpus all.
ARG PYTHON=3.12-slim-bookworm

FROM python:${PYTHON} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/kvtier
ENV PATH=/opt/kvtier/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# Apart, and first: it is large, and changes seldom.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple -c constraints.txt torch
COPY . .
# Without its native core it would be slower, and this image is no place to find that out.
RUN pip install -c constraints.txt --config-settings=cmake.define.KVTIER_NATIVE=ON ".[engine,node,s3]"

FROM python:${PYTHON}
RUN useradd --uid 10001 --user-group --create-home --home-dir /var/lib/kvtier --shell /usr/sbin/nologin kvtier \
    && install --directory --owner=kvtier --group=kvtier --mode=0750 /run/kvtier
COPY --from=build /opt/kvtier /opt/kvtier
# Models are read from folders that are mounted: nothing is downloaded while it serves.
ENV PATH=/opt/kvtier/bin:$PATH \
    HF_HUB_OFFLINE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/lib/kvtier/cache
USER 10001:10001
WORKDIR /var/lib/kvtier
EXPOSE 8000
# SIGTERM ends it: requests in flight are answered first. Any answer will do: it may speak HTTPS.
HEALTHCHECK --start-period=5m --interval=10s --timeout=3s \
    CMD ["python", "-c", "import socket; socket.create_connection(('127.0.0.1', 8000), 2).close()"]
ENTRYPOINT ["kvtier"]
CMD ["serve", "--host", "0.0.0.0", "--disk-path", "/var/lib/kvtier/slab"]
