# Makes what the services of docker-compose.yml show one another, each in a folder that it alone reads, and renews what
# has less than a third of its 90 days left. Run by the service `certs` at each `docker compose up`.
#
#   sh -eu certs.sh FOLDER
cd "$1"

# A random secret, made once. Aside and renamed, so that nothing half-made is ever read.
secret() {
    if [ ! -s "$1" ]; then
        rm -f "$1.new"
        (umask 077 && python -c "import secrets; print(secrets.token_urlsafe(32))" > "$1.new")
        mv "$1.new" "$1"
    fi
}

certs() { quire certs "$@" --authority ca --renew --days 90; }

# A certificate without a permission asks for health and no more.
certs allocator --server server --host allocator --client client
# The worker and the gateway act for callers of every namespace; a key of the gateway opens one.
certs worker --server server --host worker --client client --pool default --namespace '*'
certs worker2 --server server --host worker2 --client client --pool worker2 --namespace '*'
certs gateway --client client --observe default --observe worker2 --namespace '*'
certs vllm --client client --pool vllm --namespace ''
certs prometheus --client client --observe '*'
certs load --client client --namespace acme --namespace beta
certs operator --client client --pool '*' --observe '*' --namespace '*'

secret gateway/api-keys
# The one secret that two services have: Prometheus shows it to the gateway, and it opens /metrics alone.
secret gateway/metrics-token
cp gateway/metrics-token prometheus/metrics-token.new
mv prometheus/metrics-token.new prometheus/metrics-token
# Prometheus is another user, in this group.
chmod 0440 prometheus/client.key prometheus/metrics-token
