# Makes the certificates and secrets of the services in docker-compose.yml. Each service has its own folder, which no
# other service reads. Renews certificates with less than a third of their 90 days left. The service `certs` runs this
# script at each `docker compose up`.
#
#   sh -eu certs.sh FOLDER
cd "$1"

# Makes a random secret, unless the file exists. The file is renamed when complete, so that nobody reads a part of it.
secret() {
    if [ ! -s "$1" ]; then
        rm -f "$1.new"
        (umask 077 && python -c "import secrets; print(secrets.token_urlsafe(32))" > "$1.new")
        mv "$1.new" "$1"
    fi
}

certs() { quire certs "$@" --authority ca --renew --days 90; }

# A certificate without a permission allows only health checks.
certs allocator --server server --host allocator --client client
# Workers and the gateway act for callers of every namespace. Each API key of the gateway gives access to one namespace.
certs worker --server server --host worker --client client --pool default --namespace '*'
certs worker2 --server server --host worker2 --client client --pool worker2 --namespace '*'
certs gateway --client client --observe default --observe worker2 --namespace '*'
certs vllm --client client --pool vllm --namespace ''
certs prometheus --client client --observe '*'
certs load --client client --namespace acme --namespace beta
certs operator --client client --pool '*' --observe '*' --namespace '*'

secret gateway/api-keys
# Two services have this secret: Prometheus sends it to the gateway, to read /metrics. Callers' paths refuse it.
secret gateway/metrics-token
cp gateway/metrics-token prometheus/metrics-token.new
mv prometheus/metrics-token.new prometheus/metrics-token
# Prometheus runs as another user, in the group of these files.
chmod 0440 prometheus/client.key prometheus/metrics-token
