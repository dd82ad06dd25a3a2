# What agents' commands run in, for `[sandbox] kind = "docker"`: nothing of agentrl, and nobody but the user `agent`.
# docker build -f deploy/images/sandbox.Dockerfile -t agentrl-sandbox .
#
# BASE needs sh, tar and kill; REQUIREMENTS are packages that tasks want of Python, as pip takes them.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG PYTHON=python3
ARG REQUIREMENTS="pytest"
ARG PIP_ARGS=""
RUN if [ -n "${REQUIREMENTS}" ]; then \
        ${PYTHON} -m pip install --no-cache-dir --disable-pip-version-check ${PIP_ARGS} ${REQUIREMENTS}; fi \
    && { grep -q '^agent:' /etc/passwd || echo 'agent:x:1000:1000::/workspace:/bin/sh' >> /etc/passwd; } \
    && { grep -q '^agent:' /etc/group || echo 'agent:x:1000:' >> /etc/group; } \
    && mkdir -p /workspace && chown 1000:1000 /workspace
USER 1000:1000
WORKDIR /workspace
CMD ["sh"]
