# An engine that runs attach to (policies.NAME.engine.kind = "attached"), or start in a cluster (kind = "sglang").
# docker build -f deploy/images/engine.Dockerfile --build-arg BASE=lmsysorg/sglang:v0.5.23 -t agentrl-engine .
#
# On a base with SGLang, `python3 -m sglang.launch_server` is the base's own, and agentrl has an environment of its own beside it,
# since their versions of packages differ. On another base it serves by agentrl's embedded engine.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG PYTHON=python3
ARG EXTRAS=train,ray
ARG PIP_ARGS=""
WORKDIR /opt/source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY agentrl agentrl
COPY environments environments
COPY scaffolds scaffolds
RUN ${PYTHON} -m venv --system-site-packages --without-pip /opt/agentrl \
    && grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && ${PYTHON} -m pip --python /opt/agentrl/bin/python install --no-cache-dir --disable-pip-version-check \
        -c /tmp/constraints.txt ${PIP_ARGS} ".[${EXTRAS}]"
# Behind the base's own programs: its python3 stays the one that has SGLang.
ENV PATH=${PATH}:/opt/agentrl/bin OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
WORKDIR /work
EXPOSE 30000
ENTRYPOINT ["agentrl"]
CMD ["doctor"]
