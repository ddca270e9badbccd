# The front door. CMake does the work; each target does all of its own set-up.

.DEFAULT_GOAL := help
.PHONY: run test test-all fuzz tsan test-slurm build install bench bundle docs dist sbom deps format check-format check-includes clean help

run: ## footage -> VAE -> latents -> STDiT3 on 2 ranks, stopped and gone on -> clips from prompts (VIDEO=path: your footage)
	@tools/run_demo.sh

test: ## each part once, in some minutes; the last line is the summary of ctest
	@tools/test.sh

test-all: ## all tests (tests/README.md), also those that CI leaves out: weekly, and where their files changed
	@tools/test.sh --all

fuzz: ## every parser under clang's libFuzzer, FUZZ_SECONDS each (3600); TARGET=name for one of them
	@tools/fuzz.sh

tsan: ## the tests of everything that has threads, under ThreadSanitizer (build/tsan, a build of its own)
	@tools/tsan.sh

test-slurm: ## the job scripts under a Slurm of its own on this host (root: installs Debian's Slurm)
	@tools/test_slurm.sh

build: deps ## build/weft, Release
	@tools/build.sh

install: build ## build/weft, inputs, job scripts, docs into PREFIX (/usr/local)
	@cmake --install build $(if $(PREFIX),--prefix "$(PREFIX)")

bench: build ## a training step against PyTorch, interleaved (needs python3-venv; fetches PyTorch once)
	@tools/bench.sh

bundle: deps ## build/bundle: a folder and archives that run on any cluster, without root
	@WEFT_CUDA_ARCHITECTURES=all tools/build.sh weft weft_cpu weft_kernels weft_probe
	@tools/bundle.sh

dist: ## build/weft-VERSION.tar.gz of the last commit (REF=v0.2.0: of that one), its sha256, recipes that name them
	@tools/dist.sh

sbom: build ## build/weft.spdx.json: everything that weft is linked with, and its licences
	@python3 tools/sbom.py --program build/weft --output build/weft.spdx.json

docs: ## build/docs: these pages as a site with search (needs python3-venv; fetches mkdocs once)
	@tools/docs.sh

deps: ## installs missing packages as root, or says which are missing
	@tools/deps.sh

format: ## lays out src and tests with clang-format
	@find src tests kernels -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs clang-format -i

check-format: ## layout, tabs, blanks, lengths of files
	@tools/check_format.sh

check-includes: ## the direction of includes, and no barrier in the step loop
	@python3 tools/check_includes.py

clean: ## removes build/ (runs/ and .data/ stay)
	@rm -rf build

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s  %s\n", $$1, $$2}' Makefile
