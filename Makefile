# Everything that people and CI do with this repository. `make` builds the plugin; `make help` lists the targets.
# Each target does its own set-up, shows progress and ends with a plain result.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
TARGET := $(or $(CARGO_TARGET_DIR),target)

.PHONY: build stock stock-server stock-matrix stock-path demo test test-full fuzz lint gen gpu-pack setup help

build: ## the release library target/release/libggml-moe.so and the command target/release/ggml-moe
	@.ci/setup.sh rust
	@cargo build --release --locked
	@# Cargo cannot put a hyphen into a library's name. A link is as new as what it was made from, so it is made again each time.
	@ln -f $(TARGET)/release/libggml_moe.so $(TARGET)/release/libggml-moe.so
	@echo "build: $(TARGET)/release/libggml-moe.so"

stock: ## the stock llama.cpp that tests and demo run, fetched and built once into the cache
	@.ci/setup.sh stock
	@tests/stock/stock.sh build
	@tests/stock/stock.sh path

stock-matrix: ## other releases of ggml that the tests load the plugin into, fetched once into the cache (340 MB)
	@.ci/setup.sh matrix
	@tests/stock/matrix.sh build

stock-path: ## print the folder of the stock programs and nothing else; builds nothing
	@tests/stock/stock.sh path server

stock-server:
	@.ci/setup.sh stock
	@tests/stock/stock.sh build server

demo: build $(if $(LLAMA_BIN),,stock-server) ## a stock llama-server with the plugin answers a request on the bundled model
	@tests/demo/demo.sh $(TARGET)/release/libggml-moe.so

test: stock stock-matrix ## every test that CI runs; ends with "N passed, N failed"
	@.ci/test.sh

test-full: build stock ## all operations of stock test-backend-ops on our device, 40,000 random graphs, all of the text, endurance (about 30 minutes)
	@.ci/test.sh operations

fuzz: ## ten minutes of each fuzz target, with a nightly toolchain (tests/fuzz/run.sh)
	@.ci/setup.sh rust
	@tests/fuzz/run.sh 600

lint: build ## formatting, clippy, documentation, licences, and generated files against their sources
	@.ci/lint.sh

gpu-pack: build stock ## what tests/gpu/run.sh needs on a machine with a GPU, into .gpu/
	@tests/gpu/pack.sh

gen: build ## write the generated files again: the bindings, the kernels' PTX and docs/keys.md
	@.ci/setup.sh gen
	@tests/gen/bindings.sh
	@tests/gen/kernels.sh
	@$(TARGET)/release/ggml-moe keys --markdown > docs/keys.md
	@echo "gen: ok"

setup: ## install missing Debian packages (as root) and check the Rust toolchain
	@.ci/setup.sh all
	@echo "setup: ok"

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | while IFS=$$'\t' read -r name text; do \
	  printf '  make %-12s %s\n' "$$name" "$$text"; done
