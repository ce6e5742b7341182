# The image for launch.image, for GKE as for pyxis and enroot: docker build -t REGISTRY/jaxmnt:TAG .
FROM python:3.13-slim

# What NCCL needs for InfiniBand and RoCE, and preflight for what it shows.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

# How enroot and GKE hand in the driver.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    PATH=$PATH:/usr/local/nvidia/bin

WORKDIR /opt/jaxmnt
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY jaxmnt jaxmnt
ARG EXTRAS=cuda12,data,gs
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

RUN useradd --create-home --uid 1000 trainer
USER trainer
WORKDIR /home/trainer
