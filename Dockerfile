# syntax=docker/dockerfile:1
# kvpressure: exporter for one node. Two stages: the first has pip and builds, the second only runs.
# The vendor libraries (libnvidia-ml, libamd_smi) come from the node's container runtime, never from here.
# amd64 and arm64 from this one file: docker buildx build --platform linux/amd64,linux/arm64 .
# No digest is kept here: it would have to be that of the index of both platforms, and renewed with every Debian fix.
# Releases look it up (docker buildx imagetools inspect python:3.11-slim-bookworm) and pass BASE_DIGEST=sha256:...
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG BASE_DIGEST=""

FROM ${BASE_IMAGE}${BASE_DIGEST:+@${BASE_DIGEST}} AS build
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

FROM ${BASE_IMAGE}${BASE_DIGEST:+@${BASE_DIGEST}}
ARG BASE_IMAGE
ARG BASE_DIGEST
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="kvpressure" \
      org.opencontainers.image.description="Prometheus exporter for KV-cache pressure in vLLM on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.vendor="kvpressure maintainers" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.url="${SOURCE}" \
      org.opencontainers.image.documentation="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"
# Whatever Python the base has; the build ends if an installer is left.
RUN rm -rf /usr/local/lib/python3*/site-packages/pip* /usr/local/lib/python3*/site-packages/setuptools* \
        /usr/local/lib/python3*/site-packages/_distutils_hack /usr/local/lib/python3*/site-packages/wheel* \
        /usr/local/lib/python3*/site-packages/pkg_resources /usr/local/lib/python3*/site-packages/distutils-precedence.pth \
        /usr/local/lib/python3*/ensurepip /usr/local/bin/pip* /usr/local/bin/wheel /root/.cache \
    && python -c "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ('pip', 'setuptools', 'wheel', 'ensurepip'))))"
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
# For docker run; Kubernetes has probes of its own. With TLS, a password or another port, name --web.health-listen-address here.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10s --retries=4 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(os.environ.get('HEALTHCHECK_URL', 'http://127.0.0.1:9846/-/healthy'), timeout=4)"]
ENTRYPOINT ["kvpressure"]
CMD ["serve"]
