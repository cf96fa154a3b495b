# Sends requests of two tenants without end, so that dashboards show something. The service `load` runs this script.
#
#   QUIRE_WORKERS="HOST:PORT ..." sh -eu load.sh [ROUNDS]
rounds=${1:-0}
seed=0
while [ "$rounds" = 0 ] || [ "$seed" -lt "$rounds" ]; do
    seed=$((seed + 1))
    for worker in $QUIRE_WORKERS; do
        quire bench --worker "$worker" --namespace acme --workload chats --requests 24 --concurrency 4 --seed "$seed" &
        quire bench --worker "$worker" --namespace beta --workload distinct --requests 12 --concurrency 2 --seed "$seed" &
    done
    # A failed command does not end the script. If a worker restarts, its requests of this round fail, but not the next.
    wait
done
