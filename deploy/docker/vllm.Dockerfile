# syntax=docker/dockerfile:1
# vLLM with kvtier in its environment. From the root of the repository:
#
#   docker build -f deploy/docker/vllm.Dockerfile -t vllm-kvtier .
#   docker run --gpus all --env KVTIER_HOST_CAPACITY=64GiB vllm-kvtier MODEL
#
# Another image with vLLM 0.32 or 0.33, such as one for ROCm or a CPU: --build-arg VLLM=...
ARG VLLM=vllm/vllm-openai:v0.32.0

FROM ${VLLM} AS build
WORKDIR /src
COPY . .
# Without the built-in model, which only kvtier's own server has a use for.
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels \
    --config-settings=cmake.define.KVTIER_NATIVE=ON \
    --config-settings='wheel.exclude=kvtier/serve/engine/builtin/**' .

FROM ${VLLM}
# What kvtier needs beside vLLM is small; vLLM's own versions of the rest stay.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --upgrade-strategy only-if-needed /wheels/*.whl \
    && kvtier doctor
