# Everything runs in .venv, made here on first use; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo install lint format types imports docs unit test mutation benchmark figures performance experiments results clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(DEMO_STAMP) ## the paper's experiment, small, on Python's own documentation: minutes on two cores; see demo/report.html
	LOGDEPTH_CACHE=$(CURDIR)/demo/cache $(BIN)/logdepth reproduce pydocs --out demo

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[report,sweep]'
	touch $(DEMO_STAMP)

install: $(STAMP) ## make .venv with the package and everything its checks need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev,data,report,sweep,docs,mutation]'
	touch $(STAMP) $(DEMO_STAMP)

lint: $(STAMP) ## style and formatting, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

imports: $(STAMP) ## the arrow of docs/architecture.md: who may import whom
	$(BIN)/lint-imports

docs: $(STAMP) ## the documentation site, in site/; whatever is not linked right is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: $(STAMP) ## the tests alone
	$(BIN)/pytest -n $(WORKERS)

test: lint types imports docs unit ## everything that CI runs

mutation: $(STAMP) ## mutation testing of the index planning (minutes); survivors are explained in docs/mutants.md
	$(BIN)/mutmut run
	$(BIN)/mutmut results

benchmark: $(STAMP) ## time and memory of the scan against its floor, and of training, on the CPU
	$(BIN)/python benchmarks/scan.py --out results/scan-cpu.json
	$(BIN)/python benchmarks/train.py --device cpu --out results/train-cpu.json

figures: $(STAMP) ## draw the README's figures again, from results/ where they show numbers
	$(BIN)/python docs/figures/draw_scan.py
	$(BIN)/python docs/figures/draw_benchmark.py
	$(BIN)/python docs/figures/draw_demo.py

performance: $(STAMP) ## docs/performance.md and its figures, from results/speed-*.json
	$(BIN)/python docs/figures/draw_speed.py

experiments: $(STAMP) ## every study of docs/results.md that results/ does not hold yet: hours on a GPU; stop it and go on at will
	$(BIN)/python experiments/run.py

results: $(STAMP) ## docs/results.md, its figures and the README's table, from results/
	$(BIN)/python docs/figures/draw_results.py

clean: ## remove .venv and caches
	rm -rf $(VENV) site mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
