#!/bin/sh
# One vLLM over several nodes: forms a Ray cluster, then serves on it. docs/vllm.md says what for.
#
# On the first node, with the number of nodes and what to run on them:
#   PEAGLE_API_KEY=... deploy/vllm-ray.sh head 2 peagle serve MODEL --draft HEAD --engine vllm \
#       --tensor-parallel-size 16 --host 0.0.0.0 -- --distributed-executor-backend ray
# On every other node, with the address of the first:
#   deploy/vllm-ray.sh worker 10.0.0.1
#
# Variables: PEAGLE_VLLM_PYTHON, the python of the environment that has vLLM and ray (default: the
# one on the path); VLLM_HOST_IP, the address of this node for the others (default: Ray's choice);
# RAY_PORT (6379); RAY_WAIT_S, seconds to wait for the other nodes (600).
#
# Ray asks nobody for a key: whoever reaches its ports can run code on the nodes. Keep them in a
# network of their own, as deploy/vllm-kubernetes.yaml does. `ray stop` ends a cluster.
set -eu

usage() {
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$0" >&2
    exit 2
}

python=$(command -v "${PEAGLE_VLLM_PYTHON:-python3}") || {
    echo "vllm-ray: ${PEAGLE_VLLM_PYTHON:-python3} is not there; set PEAGLE_VLLM_PYTHON" >&2
    exit 2
}
port=${RAY_PORT:-6379}
wait_s=${RAY_WAIT_S:-600}

ray() {
    "$python" -m ray.scripts.scripts "$@"
}

# Tell Ray's makers nothing; let vLLM choose a node's address as Ray does.
export RAY_USAGE_STATS_ENABLED=0
address=${VLLM_HOST_IP:+--node-ip-address=$VLLM_HOST_IP}

case ${1:-} in
head)
    [ $# -ge 3 ] || usage
    nodes=$2
    shift 2
    # shellcheck disable=SC2086
    ray start --head --port="$port" --include-dashboard=false $address
    "$python" - "$nodes" "$wait_s" <<'PYTHON'
import sys, time
import ray

wanted, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
ray.init(address="auto", log_to_driver=False)
while (alive := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if time.monotonic() > end:
        sys.exit(f"vllm-ray: {alive} of {wanted} nodes came; start the others and try again")
    time.sleep(1)
print(f"vllm-ray: {alive} nodes", file=sys.stderr)
PYTHON
    exec "$@"
    ;;
worker)
    [ $# -eq 2 ] || usage
    "$python" - "$2" "$port" "$wait_s" <<'PYTHON'
import socket, sys, time

host, port, end = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
while True:
    try:
        socket.create_connection((host, port), timeout=5).close()
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"vllm-ray: {host} port {port} does not answer: {error}")
        time.sleep(1)
PYTHON
    # shellcheck disable=SC2086
    ray start --address="$2:$port" --block $address
    ;;
*)
    usage
    ;;
esac
