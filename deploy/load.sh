# Traffic of two tenants, for ever, so that dashboards show something. Run by the service `load`.
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
    # A worker that restarts fails a round, and not the next one.
    wait
done
