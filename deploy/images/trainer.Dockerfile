# The run itself with its trainer, rollout workers and embedded engines; also the node of a Ray cluster.
# docker build -f deploy/images/trainer.Dockerfile -t agentrl-trainer .
#
# BASE needs Python 3.11 or newer with pip. For GPUs take one that has torch for them, such as pytorch/pytorch: it is used as it
# is. The environment of the image sees the packages of its base, and gets what is missing.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG PYTHON=python3
ARG EXTRAS=train,docker,gateway,judge,metrics,otel,ray,sandbox,serve
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
ENV PATH=/opt/agentrl/bin:${PATH} OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
# Folders of runs and models are mounted here. Root, since the sandbox bwrap enforces most as root; `--user` works too.
WORKDIR /work
# The metrics of the run, where its recipe serves them.
EXPOSE 9464
ENTRYPOINT ["agentrl"]
CMD ["doctor"]
