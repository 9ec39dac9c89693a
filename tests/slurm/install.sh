#!/bin/sh
# Installs SLURM and munge where that can be done without asking: as root on a system with apt-get. No daemon is started.
set -e
PATH=$PATH:/usr/sbin:/sbin
if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "WARNING: SLURM is not installed, and cannot be from here: the tests on a real cluster (tests/slurm) will not run." >&2
  exit 0
fi
echo "installing slurm-wlm and munge for tests/slurm"
log=$(mktemp)
policy=/usr/sbin/policy-rc.d # asked by the packages' own scripts whether daemons may start
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge; } >"$log" 2>&1; then
  tail -20 "$log" >&2
  exit 1
fi
rm -f "$log"
