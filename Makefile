# make test, make demo: set up all they need, on a fresh Debian or Ubuntu as root.

PREFIX ?= /usr/local
PYTHON ?= python3
LIB = $(DESTDIR)$(PREFIX)/lib/fermata
BIN = $(DESTDIR)$(PREFIX)/bin
PACKAGES = shim layerwriter criuconf
SCRIPTS = containerd-shim-fermata-v1 fermata

.PHONY: install uninstall

install:
	rm -rf $(LIB)
	install -d $(LIB) $(BIN)
	tar -cf - --exclude=__pycache__ $(PACKAGES) | tar -xf - -C $(LIB) --no-same-owner --no-same-permissions
	for script in $(SCRIPTS); do test ! -e packaging/bin/$$script || install -m 755 packaging/bin/$$script $(BIN)/ || exit 1; done
	test -n "$(DESTDIR)" || $(PYTHON) -I -m compileall -q $(LIB)

uninstall:
	rm -rf $(LIB)
	cd $(BIN) && rm -f $(SCRIPTS)
