# make demo: porter at work in a minute. make test: the tests. Both make .venv the first time.
# make ascend-wheel: what porter says of torch_npu against the vendor's wheel, in an environment of its own, NPU_VENV.
# make ascend-triton: the Triton kernels through Ascend's compiler, in an environment of its own, TRITON_VENV.
# PYTHON=python3.12 picks the interpreter; ARGS="tests/chips -x" goes to pytest, or to the checks of the wheel.
VENV := .venv
NPU_VENV ?= .venv-torch-npu
TRITON_VENV ?= .venv-ascend-triton
BIN := $(VENV)/bin
TORCH := torch==2.13.0
TORCH_NPU := torch-npu==2.13.0
# triton-ascend imports pybind11 without requiring it.
TRITON_ASCEND := triton-ascend==3.2.0 ascendnpu-ir==1.2.0 pybind11
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.10 python3.13 python3)
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))
ARGS ?=

.PHONY: demo test ascend-wheel ascend-triton clean

demo: $(VENV)/.installed
	@$(BIN)/python -m porter.cli.demo

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(ARGS)

ascend-wheel: $(VENV)/.installed-dev $(NPU_VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.torch_npu_wheel --python $(NPU_VENV)/bin/python $(ARGS)

ascend-triton: $(TRITON_VENV)/.installed
	OMP_NUM_THREADS=1 $(TRITON_VENV)/bin/python -m benchmarks.ascend_triton --report docs/ascend_triton.md $(ARGS)

clean:
	rm -rf $(VENV) $(NPU_VENV) $(TRITON_VENV) build *.egg-info

$(BIN)/python:
	@for python in $(PYTHONS); do \
	    if $$python -c '$(USABLE)' 2>/dev/null; then echo "making $(VENV) with $$python"; exec $$python -m venv $(VENV); fi; \
	done; \
	echo "porter: no Python 3.10 to 3.13 with venv among: $(PYTHONS); name one with make PYTHON=..." >&2; exit 2

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing porter and $(TORCH) into $(VENV): minutes, the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.installed
	@echo "installing what the tests need into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[dev]'
	@touch $@

# torch must not load torch_npu by itself: the libraries of CANN are not there.
$(NPU_VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing porter, $(TORCH) and $(TORCH_NPU) into $(NPU_VENV): minutes, the first time"
	@$(BIN)/python -m venv $(NPU_VENV)
	@$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) $(TORCH_NPU) -e .
	@touch $@

# triton-ascend installs the package triton, so never beside another one.
$(TRITON_VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing porter, $(TORCH) and $(TRITON_ASCEND) into $(TRITON_VENV): minutes, the first time"
	@$(BIN)/python -m venv $(TRITON_VENV)
	@$(TRITON_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) $(TRITON_ASCEND) -e .
	@touch $@
