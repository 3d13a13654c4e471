#!/usr/bin/env bash
# Hardware counters of one variant's kernels with Nsight Compute. Equal to `worklog profile PROBLEM --with ncu`.
#
#   KERNEL='.*gemv.*' problems/PROBLEM/ncu.sh VARIANT
#
# Take the kernel's name from the nsys time line: ncu replays each launch many times, so ask for few.
# Settings by variable: KERNEL (regular expression; default: every kernel), LAUNCH_SKIP, LAUNCH_COUNT, CASE, CONFIG
# (default: the problem's first), ITERATIONS, OUT, PYTHON, WORKLOG_NCU (the binary),
# DRY_RUN=1 (print the command, one word a line, and run nothing).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
problem=$(basename "$here")
cd "$here/../.."

variant=${1:?usage: ncu.sh VARIANT (see worklog list)}
out=${OUT:-out/$problem}
ncu=${WORKLOG_NCU:-ncu}
python=${PYTHON:-python}
slug=$(sed -E 's/[^A-Za-z0-9]+/_/g; s/^_//; s/_$//' <<<"${KERNEL:-all}" | cut -c1-60)

metrics=(
  gpu__time_duration.sum                                            # the kernel's time at these clocks, under ncu
  dram__bytes_read.sum                                              # bytes that really came from device memory
  dram__bytes_write.sum
  dram__bytes.sum.per_second
  lts__t_bytes.sum                                                  # traffic through L2
  lts__t_sector_hit_rate.pct
  smsp__sass_inst_executed_op_local.sum                             # above zero: registers spilled to memory
  smsp__average_thread_inst_executed_per_inst_executed.ratio        # of 32: less is divergence
  smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio   # of 32: less is uncoalesced loads
  l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum                # shared memory bank conflicts
)

count=(
  "$ncu"
  --target-processes=all            # also processes that the program starts
  --nvtx                            # needed for the next flag
  --nvtx-include="$variant/"        # launches in the range named after the variant; the slash says push/pop range,
                                    # without it nothing matches and ncu still exits with 0
  ${KERNEL:+--kernel-name=regex:"$KERNEL"}
  --launch-skip="${LAUNCH_SKIP:-0}" # matching launches to pass over
  --launch-count="${LAUNCH_COUNT:-10}"
  --graph-profiling=node            # kernels inside a CUDA graph one by one
  --section=SpeedOfLight            # how near to the peaks of compute and memory
  --section=MemoryWorkloadAnalysis  # what moves between L1, L2 and device memory
  --section=LaunchStats             # grid, block, registers, shared memory
  --section=Occupancy               # what limits the warps in flight
  --section=WarpStateStats          # what warps wait for
  --metrics="$(IFS=,; echo "${metrics[*]}")" # by name: sections leave some of them out
  --clock-control=none              # clocks as they are in the timed runs; the record holds them
  --cache-control=all               # caches emptied before each replay: cold, as weights are in a decode step
  --force-overwrite                 # a second run replaces the first
  --export="$out/ncu.$variant.$slug.ncu-rep"
  "$python" "problems/$problem/repro.py" capture
  --variant="$variant"
  ${CASE:+--case="$CASE"}
  ${CONFIG:+--config="$CONFIG"}
  --iterations="${ITERATIONS:-1}"   # counters are the same in each
)

if [[ ${DRY_RUN:-0} == 1 ]]; then
  printf '%s\n' "${count[@]}"
  exit
fi
if ! command -v "$ncu" >/dev/null; then
  echo "ncu.sh: ncu is not on PATH; worklog doctor says where it could be and how to get it" >&2
  exit 2
fi

# Reports are published: pass on only these environment variables.
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
allowed='^(PATH|HOME|TMPDIR|LD_LIBRARY_PATH|PYTHONPATH|PYTHONUNBUFFERED|OMP_NUM_THREADS|(CUDA|NCCL|NVSHMEM|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|WORKLOG)_.*)$'
environment=()
for name in $(compgen -e); do
  if [[ $name =~ $allowed ]]; then environment+=("$name=${!name}"); fi
done
mkdir -p "$out"
env -i "${environment[@]}" "${count[@]}"
