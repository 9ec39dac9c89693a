#!/bin/bash
# Cache, then train, with nothing but sbatch:  bash chain.sh CONFIG PARTS SPLIT...
# e.g.                                         bash chain.sh my.yaml 4 train val
# Options for all jobs come from sbatch's own variables, e.g. SBATCH_PARTITION=gpu SBATCH_ACCOUNT=me.
set -euo pipefail

if [ $# -lt 3 ]; then
  sed -n '2,4s/^# //p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
config=$1
parts=$2
shift 2

jobs=
for split in "$@"; do
  job=$(sbatch --parsable --array="0-$((parts - 1))" "$here/cache.sbatch" "$config" "$split" "$parts")
  job=${job%%;*}
  echo "cache of $split: job $job"
  jobs=$jobs:$job
done
# If a part fails, training is taken out of the queue; mend it, submit that part again, and then training.
job=$(sbatch --parsable --dependency="afterok$jobs" --kill-on-invalid-dep=yes "$here/train.sbatch" "$config")
echo "training: job ${job%%;*}"
