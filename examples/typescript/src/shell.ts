// An engine behind a prompt: it answers each line of JSON with a line of JSON.
//
//     node build/typescript/dist/shell.js --allocator 127.0.0.1:7070 --pool mine
//     {"admit": [1, 2, 3, 4, 5], "namespace": ""}    {"text": 1, "matched": 0}
//     {"decode": 8}                                  {"texts": {"1": [1, 2, 3, 4, 5, ...]}}
//     {"fork": 1}                                    {"text": 2}
//     {"free": 2}                                    {}
//     {"match": [1, 2, 3, 4, 5]}                     {"matched": 4}: the allocator's answer for a prompt
//     {"mirror": [1, 2, 3, 4, 5], "until": 4}        {"matched": 4}: the mirror's answer, when it reaches `until`
//     {"state": true}                                {"digest": ..., "sequences": 1, "opened": 1}

import { createInterface } from "node:readline";
import { parseArgs } from "node:util";
import { create } from "@bufbuild/protobuf";
import { Calls } from "./calls.js";
import { Engine } from "./engine.js";
import { GroupKind, PoolSpecSchema } from "./gen/quire/v1/allocator_pb.js";
import { Owner } from "./owner.js";
import { matched, Mirror, watch } from "./reader.js";

interface Asked {
  admit?: number[];
  decode?: number;
  fork?: number;
  free?: number;
  match?: number[];
  mirror?: number[];
  until?: number;
  state?: boolean;
  namespace?: string;
}

const { values: options } = parseArgs({
  options: {
    allocator: { type: "string", default: "127.0.0.1:7070" },
    pool: { type: "string", default: "typescript" },
    blocks: { type: "string", default: "64" },
    "block-size": { type: "string", default: "4" },
  },
});
const spec = create(PoolSpecSchema, {
  blockCount: Number(options.blocks),
  groups: [{ kind: GroupKind.FULL_ATTENTION, blockSize: Number(options["block-size"]) }],
  cacheLayout: "tokens",
  modelFingerprint: Buffer.from("toy"),
});

const calls = new Calls(options.allocator);
const owner = await Owner.open(calls, options.pool, spec);
const engine = new Engine(owner);
const mirror = new Mirror(spec);
const watching = new AbortController();
void watch(calls, options.pool, mirror, watching.signal);

async function answer({ admit, decode, fork, free, match, namespace = "", ...asked }: Asked): Promise<object> {
  if (admit) return engine.admit(admit, namespace);
  if (decode) {
    for (let token = 0; token < decode; token++) await engine.decode();
    return { texts: Object.fromEntries([...engine.texts].map(([number, text]) => [number, text.tokens])) };
  }
  if (fork) return { text: await engine.fork(fork) };
  if (free) {
    await engine.free(free);
    return {};
  }
  if (match) return { matched: await matched(calls, options.pool, engine.digests(match, namespace), namespace) };
  if (asked.mirror) {
    const digests = engine.digests(asked.mirror, namespace);
    while (!mirror.isExact || mirror.matched(digests, namespace) !== (asked.until ?? mirror.matched(digests, namespace))) {
      await mirror.change();
    }
    return { matched: mirror.matched(digests, namespace) };
  }
  const digest = Buffer.from(owner.ledger.digest()).toString("hex");
  return { digest, sequences: owner.ledger.sequences.size, opened: owner.openCount };
}

for await (const line of createInterface({ input: process.stdin })) {
  try {
    console.log(JSON.stringify(await answer(JSON.parse(line))));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }));
  }
}
watching.abort();
await owner.close();
process.exit(); // The watch may still wait for an event.
