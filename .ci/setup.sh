#!/bin/sh
# Install what the demo and the tests need: Debian packages (where root) and the Python environment in .venv.
# Does nothing that is already done. Usage: [SETUP_PYTHON=python3.12] .ci/setup.sh demo|test|packages (packages: no .venv)
set -eu
cd "$(dirname "$0")/.."
want="${1:-test}"

need=""
add() { command -v "$1" >/dev/null 2>&1 || need="$need $2"; }
add prometheus prometheus
add promtool prometheus
command -v prometheus-alertmanager >/dev/null 2>&1 || add alertmanager prometheus-alertmanager
if [ "$want" != demo ]; then
    add amtool prometheus-alertmanager
    add cc gcc
    [ -e /usr/include/stdlib.h ] || need="$need libc6-dev"
    add openssl openssl
    add chromium chromium
    add kubectl kubernetes-client
fi
need=$(printf '%s\n' $need | sort -u | tr '\n' ' ')
if [ -n "$(printf %s "$need" | tr -d ' ')" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "setup: installing $need"
        # The services that Debian would start with these packages are not wanted here.
        policy=/usr/sbin/policy-rc.d
        made=""
        [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod +x "$policy"; made=1; }
        trap '[ -z "$made" ] || rm -f "$policy"' EXIT
        apt-get update -qq
        # shellcheck disable=SC2086  # a list of packages
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $need >/dev/null
    elif [ "$want" = demo ]; then
        echo "setup: not installed: $need(the demo runs without Prometheus and Alertmanager then; it says so)"
    else
        echo "setup: missing $need- install these packages, or run as root on Debian or Ubuntu" >&2
        exit 2
    fi
fi

[ "$want" != packages ] || exit 0
python=""
for candidate in ${SETUP_PYTHON:-} python3.11 python3.12 python3.13 python3; do
    if command -v "$candidate" >/dev/null 2>&1 \
        && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || { echo "setup: Python 3.11 or later is needed" >&2; exit 2; }
lock=requirements/serve.txt
[ "$want" = test ] && lock=requirements/dev.txt
stamp=".venv/.$want-$(cksum <"$lock" | tr ' ' -)"
if [ ! -e "$stamp" ]; then
    echo "setup: Python environment in .venv from $lock"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    # Not compiled: of the 46 MB most is never imported, and what is compiles itself once.
    install() { .venv/bin/python -m pip install -q --disable-pip-version-check --no-compile "$@"; }
    install --require-hashes -r "$lock"
    if [ "$want" = test ]; then
        install --no-deps --no-build-isolation -e .  # what builds it is in the lock
    else
        install --no-deps -e .
    fi
    touch "$stamp"
fi
