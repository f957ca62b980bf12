# Everything runs in .venv, made on first use. `make demo` and `make test` are all the set-up there is.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
DEMO   ?= runs/demo
RESULTS ?= benchmarks/results
GPU_TESTS := tests/kernels/test_gpu_kernels.py tests/sglang/test_ipc_gpu.py

.PHONY: demo test sglang-cpu test-sglang lint bench bench-trl gpu gpu-rest gpu-train gpu-tune nightly clean

demo: $(VENV)/.ready
	$(RUN) examples/demo.py --output $(DEMO)

test: $(VENV)/.ready-dev lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 -m "not slow and not gpu and not sglang"

sglang-cpu: $(VENV)/.ready-dev  # a CPU-only SGLang in a cache folder outside the clone; prints its Python
	@$(RUN) tools/sglang_cpu/install.py

test-sglang: sglang-cpu
	OMP_NUM_THREADS=1 RLKIT_SGLANG_PYTHON=$$($(RUN) tools/sglang_cpu/install.py) $(RUN) -m pytest -m sglang tests/sglang

lint: $(VENV)/.ready-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/vulture

nightly: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 -m "not gpu and not sglang"

bench: $(VENV)/.ready-dev
	$(RUN) benchmarks/generation.py
	$(RUN) benchmarks/linear_logp_cpu.py
	$(RUN) benchmarks/linear_scan_cpu.py
	$(RUN) benchmarks/advantages.py
	OMP_NUM_THREADS=1 $(RUN) benchmarks/packing.py
	OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/fsdp_overhead.py
	$(RUN) benchmarks/memory.py --check
	$(RUN) benchmarks/memory.py
	$(RUN) benchmarks/context.py

bench-trl: $(VENV)/.ready-dev
	$(RUN) benchmarks/peers/compare_trl.py

gpu:  # on the machine with the device: its own Python, nothing is installed; under 9 minutes
	export PYTHONPATH=.:$$PYTHONPATH; timeout -s INT 240 $(PYTHON) -m pytest -n 4 -m gpu $(GPU_TESTS); \
	tests=$$?; $(PYTHON) benchmarks/gpu_kernels.py --seconds 260 --out $(RESULTS) && exit $$tests

gpu-rest:  # the shapes that `make gpu` had no time for
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) benchmarks/gpu_kernels.py --seconds 500 --rest --out $(RESULTS)

gpu-train:  # a model on the device: attention, bf16, FSDP2, checkpoints, a GRPO run; under 5 minutes
	PYTHONPATH=.:$$PYTHONPATH timeout -s INT 300 $(PYTHON) -m pytest -m gpu tests/test_gpu.py

gpu-tune:  # the kernels' constants, and the best ones for this device; under 8 minutes
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) benchmarks/gpu_tune.py --seconds 420 --out $(RESULTS)

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml | $(VENV)/bin/pip
	$(VENV)/bin/pip install --quiet --disable-pip-version-check "torch>=2.11,<2.14"
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -e ".[data,plot]"
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
