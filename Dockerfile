# syntax=docker/dockerfile:1
# kvpressure: exporter for one node. Two stages: the first has pip and builds, the second only runs.
# The vendor libraries (libnvidia-ml, libamd_smi) come from the node's container runtime, never from here.
# The name, not a digest, so that the build can be given another base; releases pass BASE_IMAGE with a digest.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY requirements/serve.txt requirements/build.txt /src/requirements/
RUN python -m venv /opt/kvpressure \
    && /opt/kvpressure/bin/pip install --no-cache-dir --no-compile --require-hashes -r requirements/serve.txt \
    && /opt/kvpressure/bin/pip install --no-cache-dir --no-compile --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE /src/
COPY exporter /src/exporter
RUN /opt/kvpressure/bin/pip install --no-cache-dir --no-compile --no-deps --no-build-isolation /src \
    && /opt/kvpressure/bin/pip uninstall -y packaging setuptools wheel pip \
    && find /opt/kvpressure -name '*.pyi' -delete

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvpressure" \
      org.opencontainers.image.description="Prometheus exporter for KV-cache pressure in vLLM on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN rm -rf /usr/local/lib/python3.11/site-packages/pip* /usr/local/lib/python3.11/site-packages/setuptools* \
        /usr/local/lib/python3.11/site-packages/_distutils_hack /usr/local/lib/python3.11/site-packages/wheel* \
        /usr/local/lib/python3.11/site-packages/pkg_resources /usr/local/lib/python3.11/site-packages/distutils-precedence.pth \
        /usr/local/lib/python3.11/ensurepip /usr/local/bin/pip* /usr/local/bin/wheel /root/.cache
COPY --from=build /opt/kvpressure /opt/kvpressure
ENV PATH=/opt/kvpressure/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MALLOC_ARENA_MAX=2 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=utility \
    RSMI_MUTEX_THREAD_ONLY=1
EXPOSE 9846
# uid 0 without capabilities reads the kubelet's pod-resources socket; without pod mapping any uid will do.
# hadolint ignore=DL3002
USER 0
ENTRYPOINT ["kvpressure"]
CMD ["serve"]
