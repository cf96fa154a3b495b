// Checks resources of cert-manager and of the Prometheus operator against their schemas: a JSON list on standard input.
// Prints a line for each fault; the exit status is 1 if there is one.
import { readFileSync } from "node:fs";
import * as certificates from "@kubernetes-models/cert-manager/cert-manager.io/v1";
import * as monitoring from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const groups = { "cert-manager.io/v1": certificates, "monitoring.coreos.com/v1": monitoring };
let faults = 0;
for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  const known = (groups[resource.apiVersion] ?? {})[resource.kind];
  try {
    if (known === undefined) throw new Error(`no schema of ${resource.apiVersion} ${resource.kind}`);
    new known(resource).validate();
  } catch (error) {
    faults += 1;
    console.log(`${resource.kind} ${resource.metadata.name}: ${error.message}`);
  }
}
process.exit(faults ? 1 : 0);
