#!/usr/bin/env bash
# Time line of one variant with Nsight Systems, and its export to SQLite. Equal to `worklog profile PROBLEM --with nsys`.
#
#   problems/PROBLEM/nsys.sh VARIANT                what ran: every kernel, also inside CUDA graphs
#   PASS=timing problems/PROBLEM/nsys.sh VARIANT    how long: a CUDA graph is one piece, which costs the run little
#
# Settings by variable: CASE, CONFIG (default: the problem's first), ITERATIONS, OUT, PYTHON,
# WORKLOG_NSYS (the binary), WORKLOG_NSYS_LIBRARY_PATH (folder with libdw, where nsys's importer lacks it),
# DRY_RUN=1 (print the commands, one word a line, and run nothing).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
problem=$(basename "$here")
cd "$here/../.."

variant=${1:?usage: nsys.sh VARIANT (see worklog list)}
out=${OUT:-out/$problem}
nsys=${WORKLOG_NSYS:-nsys}
python=${PYTHON:-python}
case ${PASS:-attribution} in
  attribution) report=$out/nsys.$variant graphs=node ;;
  timing) report=$out/nsys.$variant.timing graphs=graph ;;
  *) echo "nsys.sh: PASS is attribution or timing, not $PASS" >&2; exit 2 ;;
esac

record=(
  "$nsys" profile
  --trace=cuda,nvtx                 # CUDA calls, kernels, copies, and the range named after the variant; cuBLAS and OS
                                    # calls are left out: they slow the host and the kernels' names already say them
  --cuda-graph-trace="$graphs"      # node: rows for the kernels in a graph; graph: none of them, but true times
  --sample=none                     # no CPU sampling: it costs minutes and gigabytes and answers nothing asked here
  --cpuctxsw=none                   # no thread switches, for the same reason
  --capture-range=cudaProfilerApi   # start at cudaProfilerStart: building, compiling and warm-up are not recorded
  --capture-range-end=stop          # stop at cudaProfilerStop and let the program end by itself
  --force-overwrite=true            # a second run replaces the first
  --output="$report.nsys-rep"
  "$python" "problems/$problem/repro.py" capture
  --variant="$variant"
  ${CASE:+--case="$CASE"}
  ${CONFIG:+--config="$CONFIG"}
  --iterations="${ITERATIONS:-3}"   # few: three show whether they are alike
)
export_tables=(
  "$nsys" export
  --type=sqlite                     # tables that any SQLite client and pandas read
  --force-overwrite=true
  --output="$report.sqlite"
  "$report.nsys-rep"
)

if [[ ${DRY_RUN:-0} == 1 ]]; then
  printf '%s\n' "${record[@]}" "" "${export_tables[@]}"
  exit
fi
if ! command -v "$nsys" >/dev/null; then
  echo "nsys.sh: nsys is not on PATH; worklog doctor says where it could be and how to get it" >&2
  exit 2
fi

# nsys writes every environment variable of the program into the report. Reports are published: pass on only these.
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
export LD_LIBRARY_PATH=${WORKLOG_NSYS_LIBRARY_PATH:+$WORKLOG_NSYS_LIBRARY_PATH:}${LD_LIBRARY_PATH:-}
allowed='^(PATH|HOME|TMPDIR|LD_LIBRARY_PATH|PYTHONPATH|PYTHONUNBUFFERED|OMP_NUM_THREADS|(CUDA|NCCL|NVSHMEM|PYTORCH|TORCH|TORCHINDUCTOR|TRITON|WORKLOG)_.*)$'
environment=()
for name in $(compgen -e); do
  if [[ $name =~ $allowed ]]; then environment+=("$name=${!name}"); fi
done
mkdir -p "$out"
env -i "${environment[@]}" "${record[@]}"
env -i "${environment[@]}" "${export_tables[@]}"
