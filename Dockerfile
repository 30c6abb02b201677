# One image for all six services. compose.yaml builds it and chooses the command. For NVIDIA GPUs (prefill-gpu, decode-gpu) it needs
# MOONCAKE=cuda13 or cuda12 and a torch build for the same CUDA version.
FROM python:3.12-slim AS build
ARG MOONCAKE=cpu
# Package index for torch, such as PyTorch's index of CPU wheels; empty: pip's default.
ARG WEFT_TORCH_INDEX=
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN python -m venv /opt/weft \
    && /opt/weft/bin/pip install --no-cache-dir --no-deps ${WEFT_TORCH_INDEX:+--index-url "$WEFT_TORCH_INDEX"} \
        "torch==$(sed -n 's/^torch==//p' constraints.txt)"
# Dependencies first, so that a change of the sources alone reinstalls no library.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; print(*p['dependencies'], *e['engine'], *e['mooncake-$MOONCAKE'], sep='\n')" > needs.txt \
    && /opt/weft/bin/pip install --no-cache-dir -c constraints.txt -r needs.txt hatchling editables
# Fail the build on a CUDA mismatch; at run time it would only be slow.
RUN [ "$MOONCAKE" = cpu ] || /opt/weft/bin/python -c "import sys, torch; cuda = torch.version.cuda; \
    sys.exit(f'cuda{cuda}'.partition('.')[0] != '$MOONCAKE' and f'torch is built for CUDA {cuda}, and MOONCAKE=$MOONCAKE')"
COPY protos/generated protos/generated
COPY kernels kernels
COPY bundle bundle
COPY libs libs
COPY services services
RUN /opt/weft/bin/pip install --no-cache-dir --no-deps --no-build-isolation .
# Compile the CPU kernels for every supported x86 instruction set, because the final image has no C++ compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && { WEFT_KERNEL_CACHE=/opt/weft/kernels /opt/weft/bin/python -m weft_kernels.native && /opt/weft/bin/python -m weft_bundle.rans || true; }

FROM python:3.12-slim
ARG MOONCAKE=cpu
# System libraries of Mooncake's wheels (the GPU ones also need libmlx5 of ibverbs-providers). Triton compiles its launcher with gcc.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers librdmacm1 libnuma1 libcurl4 liburing2 \
        $([ "$MOONCAKE" = cpu ] || echo gcc libc6-dev) \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home weft \
    # New volumes inherit this owner.
    && install -d -o weft -g weft -m 700 /hub \
    && install -d -o weft -g weft -m 700 /kv
COPY --from=build /opt/weft /opt/weft
ENV PATH=/opt/weft/bin:$PATH WEFT_KERNEL_CACHE=/opt/weft/kernels PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER weft
WORKDIR /home/weft
CMD ["weft", "--help"]
