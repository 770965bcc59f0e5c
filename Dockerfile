# JupyterLab with the notebooks, for an ordinary user without privileges, with the versions in constraints.txt.
#
#   docker build -t ddp-tutorial .                              # for CPUs
#   docker build -t ddp-tutorial --build-arg VARIANT=cuda .     # with the CUDA build of PyTorch; several gigabytes
#   docker run --rm -it -p 127.0.0.1:8888:8888 --shm-size 1g ddp-tutorial    # with GPUs: add --gpus all
#   docker run --rm -it --shm-size 1g ddp-tutorial make run
#
# This file has not been built with Docker yet. book/installation.md describes which steps were run by hand.
FROM python:3.11-slim-bookworm

# hadolint ignore=DL3008  # any version of make will do
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 learner

USER 1000:1000
WORKDIR /home/learner/ddp_tutorial
COPY --chown=1000:1000 . .

# The CUDA build on PyPI contains the CUDA libraries. The machine needs the driver and the NVIDIA container toolkit.
ARG VARIANT=cpu
RUN case "$VARIANT" in \
        cpu) export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ;; \
        cuda) ;; \
        *) echo "VARIANT must be cpu or cuda, got $VARIANT" >&2; exit 2 ;; \
    esac \
    && PIP_NO_CACHE_DIR=1 make setup

ENV PATH=/home/learner/ddp_tutorial/.venv/bin:$PATH \
    JUPYTER_CONFIG_PATH=/home/learner/ddp_tutorial/notebooks/.jupyter
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "notebooks/00_quickstart.ipynb"]
