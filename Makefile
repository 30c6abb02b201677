# Two commands are enough: `make serve` and `make test`. Each makes .venv and installs what it needs; the second time that takes no time.
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help serve smollm2 test smollm2-test soak chaos pauses page-test client-test wheel-test template-test agents lint protos install install-dev pin clean formats-test

help:
	@echo "make serve    install, then run the whole mesh on http://127.0.0.1:$(PORT)   (PORT=8080 ARGS='--decode 2')"
	@echo "make smollm2  the same with SmolLM2-135M-Instruct, which it downloads (93 MB) and converts"
	@echo "make test     install, then run every test                              (ARGS='-k name')"
	@echo "make soak     the engine at random for 100,000 steps a family and loop, freed memory poisoned (an hour; ARGS='-k llama4')"
	@echo "make chaos    the whole fault matrix, --rounds times                   (ARGS='--rounds 20', and --heads to draft)"
	@echo "make pauses   30 minutes of paused and killed processes, memory of each watched  (ARGS='--minutes 5')"
	@echo "make smollm2-test  SmolLM2 out of its GGUF file: weights, tokenizer and 55 chats against transformers (a quarter of an hour)"
	@echo "make page-test  the page at / in headless Chromium, which it installs where it is missing"
	@echo "make client-test  LiteLLM, Schemathesis and the TypeScript SDKs against a gateway and a whole mesh; installs them, node must be there"
	@echo "make wheel-test  builds the wheel, installs it into new environments and serves weft-nano from there (a minute or two; pip installs torch)"
	@echo "make template-test  chat templates of a folder against transformers, and their calls read back  (DIR=folder ARGS='--list')"
	@echo "make agents   Claude Code, Codex and OpenCode list a folder through the gateway; npm installs them (1 GB)"
	@echo "make formats-test  SmolLM2, as make smollm2 leaves it, in every quantized format: 8 texts each against transformers (ARGS='--only awq')"
	@echo "make lint     style, types, import directions, wire contracts, compose"
	@echo "make protos   compile protos/weft_mesh into protos/generated"
	@echo "make pin      write constraints.txt from what is installed in $(VENV)"
	@echo "make clean    remove $(VENV), the clients and caches"

serve: install
	@exec $(BIN)/weft up --port $(PORT) $(ARGS)

smollm2: install
	@exec scripts/smollm2.sh --port $(PORT) $(ARGS)

test: install-dev
	@scripts/test.sh $(ARGS)

soak: install-dev
	WEFT_SOAK_STEPS=100000 WEFT_SOAK_EXAMPLES=400 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/weft/engine/test_soak.py tests/weft/engine/test_loop.py tests/weft/engine/test_families.py tests/services/decode/test_families.py $(ARGS)

# --tb=native: Python 3.11 fails to show long tracebacks of nested groups
chaos: install-dev
	@exec $(BIN)/python -m pytest tests/chaos --rounds 1 --tb=native $(ARGS)

pauses: install-dev
	@exec $(BIN)/python -m loadtest.pauses $(ARGS)

smollm2-test: install-dev
	@exec scripts/smollm2.sh test $(ARGS)

page-test: install-dev
	@scripts/page-test.sh $(ARGS)

client-test: install-dev
	@scripts/client-test.sh $(ARGS)

wheel-test: install-dev
	@scripts/wheel-test.sh $(ARGS)

DIR ?= tests/services/gateway/templates
template-test: install-dev
	@exec $(BIN)/python -m loadtest.templates $(DIR) $(ARGS)

agents: install-dev
	@scripts/agents.sh $(ARGS)

formats-test: install-dev
	@exec $(BIN)/python -m loadtest.formats $(ARGS)

lint: install-dev
	@scripts/lint.sh

protos: install-dev
	$(BIN)/python protos/compile.py

install:
	@scripts/install.sh

install-dev:
	@scripts/install.sh dev

pin: install-dev
	$(BIN)/python scripts/pin.py

clean:
	rm -rf $(VENV) $(VENV)-clients .weft tests/clients/node/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
