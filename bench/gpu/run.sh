#!/usr/bin/env bash
# A call of bench.gpu on a machine without a network (README.md); `TOY=1 bash bench/gpu/run.sh N`
# rehearses it on a CPU. What is missing there comes as archives in .lease/N.
set -uo pipefail
call=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
carried=$root/.lease
export OUT=${OUT:-/tmp/lease-out} PYTHONUNBUFFERED=1
state=${LEASE_STATE:-$HOME/lease}; site=${SITE:-$HOME/site}; start=$SECONDS
mkdir -p "$state" "$OUT" "$site/bin"
say() { echo "--- $((SECONDS - start)) s: $*"; }
# The last: cutlass is found through a .pth file, which Python does not read in a folder of PYTHONPATH.
export PYTHONPATH=$root:$site:$site/nvidia_cutlass_dsl/dsl_packages PATH=$site/bin:$PATH
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export DLLM_COMMIT=$(cat "$carried/bin/commit" 2>/dev/null || echo unknown)
cd "$root"

unpack() { # FOLDER: its archives side by side; what is there already is left alone
    for archive in "$1"/*.tar.xz; do
        [ -e "$archive" ] || continue
        name=$(basename "$archive")
        [ -e "$site/.have-$name" ] && continue
        [ -n "${TOY:-}" ] && [ "$name" != checkpoints.tar.xz ] && continue
        (python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' "$archive" "$site" &&
            touch "$site/.have-$name" || echo "UNPACK FAILED $name") &
    done
    wait
    chmod +x "$site"/bin/* 2>/dev/null
    python3 -W ignore -m compileall -q -j 0 "$site" "$root/dllm" "$root/attention" "$root/quant" "$root/bench" >/dev/null 2>&1
    say "unpacked $1: $(ls "$site" | wc -l) entries"
}

command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
unpack "$carried/$call"
[ -n "${TOY:-}" ] || [ -e "$site/vllm/__init__.py" ] || { echo "This machine is bare: begin again with call 1."; exit 3; }
# In every call: what the tree does not have is removed from it when the next call's tree comes.
[ -e "$root/checkpoints" ] || ln -s "$site/checkpoints" "$root/checkpoints"
# The tokenizer of models that are written there.
[ -e "$root/checkpoints/tiny-random" ] || cp -r "$carried/bin/tiny-random" "$root/checkpoints/"
mkdir -p "$site/dllm-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: dllm\nVersion: 0.1.0\n' >"$site/dllm-0.1.0.dist-info/METADATA"
printf '[vllm.general_plugins]\ndllm = dllm:register\ndllm_namesakes = dllm:refuse_namesakes\n' >"$site/dllm-0.1.0.dist-info/entry_points.txt"
[ "$call" != 2 ] || [ -n "${TOY:-}" ] ||
    python3 -c 'from vllm.v1.attention.backends.fa_utils import is_fa_version_supported as f; print("FlashAttention 4:", f(4))' 2>&1 | tail -1
python3 -m bench.gpu --call "$call" --state "$state" --out "$OUT" ${TOY:+--toy}
code=$?
say "end of call $call, exit status $code"
exit $code
