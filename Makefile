# make test and make demo set up all they need, on a fresh Debian or Ubuntu as root.

PREFIX ?= /usr/local
PYTHON ?= python3
LIB = $(DESTDIR)$(PREFIX)/lib/fermata
BIN = $(DESTDIR)$(PREFIX)/bin
UNITS = $(DESTDIR)$(PREFIX)/lib/systemd/system
SHARE = $(DESTDIR)$(PREFIX)/share/fermata
PACKAGES = shim layerwriter criuconf differ
SCRIPTS = containerd-shim-fermata-v1 fermata fermata-differ

VENV = .venv
# Another minor version of ruff may format or check otherwise.
TOOLS = pytest pytest-timeout pytest-rerunfailures pytest-xdist hypothesis prometheus-client protobuf grpcio setuptools wheel "mypy>=2.4,<3" "ruff>=0.17,<0.18" zstandard jsonschema pyyaml numpy
# Programs that tests and the node need, each with the package that has it.
PROGRAMS = mmdebstrap:mmdebstrap nsenter:util-linux ip:iproute2 nft:nftables iptables:iptables tar:tar gpg:gpg \
  zstd:zstd umoci:umoci skopeo:skopeo mkfs.xfs:xfsprogs chattr:e2fsprogs

.PHONY: test lint unit node torture fuzz bench demo install uninstall deb deb-check clean programs

# The tests run whatever lint says, and come last: their closing line holds the counts. Tests with real daemons that are
# killed at a moment miss it now and then on a busy machine: one that fails is run once more, and told with what failed.
RERUN = --reruns 1 --rerun-show-tracebacks
# The nodes of two stacks and the unit tests beside each other: see tests/workers.py.
WORKERS = 3
test: $(VENV)/ready
	@status=0; $(MAKE) --no-print-directory lint || status=1; \
	$(VENV)/bin/python -m pytest -n $(WORKERS) $(RERUN) || status=1; exit $$status

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

unit: $(VENV)/ready
	$(VENV)/bin/python -m pytest tests/unit

node: $(VENV)/ready
	$(VENV)/bin/python -m pytest -n $(WORKERS) $(RERUN) tests/node

# Every fault at every step, hostile input for longer, load, and many times what make test does a few times. At most 25
# minutes, on both stacks at the same time.
TORTURED = steps faults guest_faults guest_kinds at_once places hostile load network round_trip takes
STACKS = trixie sid
torture: $(VENV)/ready
	@$(MAKE) --no-print-directory --keep-going --jobs --output-sync=target $(addprefix torture-,$(STACKS))

torture-%: $(VENV)/ready
	FERMATA_STACKS=$* FERMATA_TORTURE=1 FERMATA_SWITCHES=12 FERMATA_CREATES=20 \
	  timeout 1500 $(VENV)/bin/python -m pytest -o timeout=900 -p no:cacheprovider \
	  $(addprefix tests/node/test_,$(addsuffix .py,$(TORTURED))) \
	  tests/node/test_upgrade.py::test_no_shim_mixes_versions_while_many_start_and_two_take_each_others_place

# Random input for the reader of layers, for SECONDS. What it finds is left in a file here.
SECONDS = 120
fuzz: $(VENV)/ready
	$(VENV)/bin/python -m tests.fuzz.layers --seconds $(SECONDS)

# Ratios against the stock runtime; no verdict.
bench: programs
	$(PYTHON) bench/shim.py
	$(PYTHON) bench/stress.py
	$(PYTHON) bench/take.py
	$(PYTHON) bench/layers.py

demo: programs
	$(PYTHON) packaging/demo/demo.py

# Without DESTDIR, the modules are compiled too, and the library changes in one step: containers that run hold theirs open
# (shim/library.py). With it, that is for whoever knows the python3 that is going to run them.
install:
	rm -rf $(LIB).new
	install -d $(LIB).new $(BIN)
	tar -cf - --exclude=__pycache__ $(PACKAGES) | tar -xf - -C $(LIB).new --no-same-owner --no-same-permissions
	if [ -n "$(DESTDIR)" ]; then rm -rf $(LIB) && mv $(LIB).new $(LIB); else \
	  python=/usr/bin/python3; test -x $$python || python=$(PYTHON); $$python -I $(LIB).new/shim/library.py $(LIB).new $(LIB); fi
	for script in $(SCRIPTS); do \
	  install -m 755 packaging/bin/$$script $(BIN)/.$$script.new && mv -f $(BIN)/.$$script.new $(BIN)/$$script || exit 1; \
	done
	install -d $(UNITS) $(SHARE)
	for unit in socket service; do \
	  sed 's|/usr/local|$(PREFIX)|' packaging/systemd/fermata-differ.$$unit >$(UNITS)/fermata-differ.$$unit || exit 1; \
	done
	for file in packaging/containerd/*.toml packaging/kubernetes/* packaging/prometheus/* packaging/tmpfiles/huge-pages.conf \
	  packaging/modprobe/*; do \
	  sed 's|/usr/local|$(PREFIX)|' $$file >$(SHARE)/$${file##*/} || exit 1; \
	done

uninstall:
	rm -rf $(LIB) $(SHARE)
	rm -f $(UNITS)/fermata-differ.socket $(UNITS)/fermata-differ.service
	cd $(BIN) && rm -f $(SCRIPTS)

deb:
	@$(PYTHON) packaging/deb/build.py dist

# The .deb on every distribution that it is for. Where this machine has no keyring of Ubuntu's, give its roots by hand.
deb-check: $(VENV)/ready
	FERMATA_DISTRIBUTIONS=all $(VENV)/bin/python -m pytest -o timeout=1500 tests/node/test_distributions.py

clean:
	$(PYTHON) packaging/node down --all
	rm -rf .cache $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

programs:
	@missing=; for pair in $(PROGRAMS); do \
	  command -v $${pair%%:*} >/dev/null 2>&1 || test -x /usr/sbin/$${pair%%:*} || missing="$$missing $${pair##*:}"; \
	done; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends $$missing; \
	  else echo "missing, and only root can install them:$$missing" >&2; fi; \
	fi

# On Debian and Ubuntu the venv module lacks what it needs until python3-venv is installed.
$(VENV)/ready: pyproject.toml Makefile | programs
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); apt-get -q update; \
	  DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends python3-venv && $(PYTHON) -m venv $(VENV); }
	$(VENV)/bin/python -m pip install --quiet $(TOOLS)
	touch $@
