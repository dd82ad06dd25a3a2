# A server of environments, without torch: `agentrl env serve`.
# docker build -f deploy/images/environment.Dockerfile -t agentrl-environment .
#
# REQUIREMENTS are packages of environments of your own, as pip takes them.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG PYTHON=python3
ARG EXTRAS=serve,sandbox,docker
ARG REQUIREMENTS=""
ARG PIP_ARGS=""
WORKDIR /opt/source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY agentrl agentrl
COPY environments environments
COPY scaffolds scaffolds
RUN ${PYTHON} -m venv --system-site-packages --without-pip /opt/agentrl \
    && ${PYTHON} -m pip --python /opt/agentrl/bin/python install --no-cache-dir --disable-pip-version-check \
        -c constraints.txt ${PIP_ARGS} ".[${EXTRAS}]" ${REQUIREMENTS}
ENV PATH=/opt/agentrl/bin:${PATH}
WORKDIR /work
EXPOSE 8100
# Answered without the token.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["/opt/agentrl/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8100/health', timeout=4)"]
ENTRYPOINT ["agentrl"]
CMD ["env", "serve", "sql", "--host", "0.0.0.0", "--token-file", "/run/secrets/environment_token"]
