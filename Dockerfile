# Images of Luyen: `docker build --target cpu -t luyen:cpu .` and `--target cuda`.
# docs/docker.md says how to run them.
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
RUN pip install --no-cache-dir build==1.3.0
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY src ./src
RUN python -m build --wheel --outdir /wheel

# What both images share: a user without rights, a folder to work in, the command.
FROM python:3.11-slim-bookworm AS base
RUN useradd --create-home --uid 1000 luyen && mkdir /work && chown luyen /work
ENV PYTHONUNBUFFERED=1 HF_HOME=/work/.cache/huggingface
COPY constraints.txt /wheel/constraints.txt
COPY --from=wheel /wheel/*.whl /wheel/

FROM base AS cpu
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install --no-cache-dir -c /wheel/constraints.txt /wheel/*.whl
USER 1000
WORKDIR /work
ENTRYPOINT ["luyen"]
CMD ["--help"]

# torch from PyPI brings the CUDA libraries; the driver comes from the host. Triton compiles with gcc.
FROM base AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch==2.13.0 \
    && luyen_wheel=$(ls /wheel/*.whl) \
    && pip install --no-cache-dir -c /wheel/constraints.txt "${luyen_wheel}[ray,serve]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
ENTRYPOINT ["luyen"]
CMD ["--help"]
