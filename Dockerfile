# One image for all six services; compose.yaml chooses which one runs, and builds it: for CPUs, or with MOONCAKE=cuda13 (or cuda12) and
# a build of torch for the same CUDA for NVIDIA GPUs (its services prefill-gpu and decode-gpu).
FROM python:3.12-slim AS build
ARG MOONCAKE=cpu
# a package index with the torch build you want, e.g. PyTorch's index of CPU wheels; empty: pip's default
ARG WEFT_TORCH_INDEX=
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN python -m venv /opt/weft \
    && /opt/weft/bin/pip install --no-cache-dir --no-deps ${WEFT_TORCH_INDEX:+--index-url "$WEFT_TORCH_INDEX"} \
        "torch==$(sed -n 's/^torch==//p' constraints.txt)"
# what Weft needs, before Weft itself: a change of the sources alone installs no library anew
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; print(*p['dependencies'], *e['engine'], *e['mooncake-$MOONCAKE'], sep='\n')" > needs.txt \
    && /opt/weft/bin/pip install --no-cache-dir -c constraints.txt -r needs.txt hatchling editables
# else only somebody who wonders why it is slow would find out
RUN [ "$MOONCAKE" = cpu ] || /opt/weft/bin/python -c "import sys, torch; cuda = torch.version.cuda; \
    sys.exit(f'cuda{cuda}'.partition('.')[0] != '$MOONCAKE' and f'torch is built for CUDA {cuda}, and MOONCAKE=$MOONCAKE')"
COPY protos/generated protos/generated
COPY kernels kernels
COPY libs libs
COPY services services
RUN /opt/weft/bin/pip install --no-cache-dir --no-deps --no-build-isolation .
# the CPU kernels for every x86 instruction set that they know; the image that runs has no C++ compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && { WEFT_KERNEL_CACHE=/opt/weft/kernels /opt/weft/bin/python -m weft_kernels.native || true; }

FROM python:3.12-slim
ARG MOONCAKE=cpu
# Mooncake's wheels load these from the system, those for GPUs libmlx5 of ibverbs-providers too; Triton compiles its launcher for the GPU that it finds
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers librdmacm1 libnuma1 libcurl4 liburing2 \
        $([ "$MOONCAKE" = cpu ] || echo gcc libc6-dev) \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home weft \
    # a new volume takes over whose this is
    && install -d -o weft -g weft -m 700 /kv
COPY --from=build /opt/weft /opt/weft
ENV PATH=/opt/weft/bin:$PATH WEFT_KERNEL_CACHE=/opt/weft/kernels PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER weft
WORKDIR /home/weft
CMD ["weft", "--help"]
