# The base of every problem's image: CUDA's compiler and headers, Python, nsys and ncu.
# Build: scripts/docker-build. The pins are those of versions.env.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92
FROM ${CUDA_IMAGE}
ARG CUDA_IMAGE
LABEL org.opencontainers.image.title="worklog" \
      org.opencontainers.image.base.name="${CUDA_IMAGE}"

# Python.h is for Triton's launchers. NVIDIA's package repository is configured in its image already; a package of
# Nsight carries its version in its name too.
ARG PYTHON_VERSION=3.12
ARG NSIGHT_SYSTEMS_VERSION=2025.3.2.474
ARG NSIGHT_COMPUTE_VERSION=2025.3.1.4
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        "python3=${PYTHON_VERSION}.*" \
        "python3-dev=${PYTHON_VERSION}.*" \
        "python3-venv=${PYTHON_VERSION}.*" \
        "nsight-systems-2025.3.2=${NSIGHT_SYSTEMS_VERSION}-*" \
        "nsight-compute-2025.3.1=${NSIGHT_COMPUTE_VERSION}-*" \
    && rm -rf /var/lib/apt/lists/*

# worklog runs from /worklog/src: a change of code installs nothing. Any user may write results and caches, since the
# caller's number (docker run --user) is known only when the container starts.
WORKDIR /worklog
ENV PATH=/worklog/.venv/bin:${PATH}:/opt/nvidia/nsight-systems/2025.3.2/bin:/opt/nvidia/nsight-compute/2025.3.1 \
    HOME=/cache \
    USER=worklog \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    WORKLOG_ROOT=/worklog \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv .venv \
    && echo /worklog/src >"$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/worklog.pth" \
    && printf '#!/bin/sh\nexec python -m worklog.cli "$@"\n' >.venv/bin/worklog \
    && chmod 755 .venv/bin/worklog \
    && mkdir --mode=1777 out /cache
VOLUME ["/cache"]
USER 1000:1000
