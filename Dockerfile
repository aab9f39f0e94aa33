# A service of processors: docker build -t penstock . && docker run --rm --read-only --tmpfs /tmp -p 8000:8000 \
#     -e PENSTOCK_API_KEY=... -v ~/models:/models:ro penstock serve /models/NAME --host 0.0.0.0      (docs/container.md)
FROM debian:12-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3 -m venv /opt/penstock \
    && /opt/penstock/bin/pip install --no-cache-dir --no-compile --disable-pip-version-check \
        -c /src/constraints.txt '/src[vision,uvloop,encryption,picker]' \
    && /opt/penstock/bin/pip uninstall -y pip \
    && /opt/penstock/bin/python -c 'import penstock.cli.chat, penstock.cli.serve; from penstock.launch.compose import GATEWAY_MODULES, preload_modules; preload_modules(GATEWAY_MODULES)'

FROM debian:12-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home penstock
COPY --from=build /opt/penstock /opt/penstock
# Nothing is written but below /tmp, so the root file system can be read-only (with a tmpfs there).
ENV PATH=/opt/penstock/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME=/tmp/cache HF_HOME=/tmp/hub
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ.get('PENSTOCK_PORT', '8000') + '/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["penstock"]
CMD ["serve", "--host", "0.0.0.0"]
