// Answers conformance/run.py at level 1: one line of JSON per line.

import { createInterface } from "node:readline";
import { fromJson, type JsonValue } from "@bufbuild/protobuf";
import { PoolSpecSchema, StepReplySchema, StepSchema } from "./gen/quire/v1/allocator_pb.js";
import { blockDigests, rootDigest } from "./hash.js";
import { Ledger, partDigest, stateDigest, type Sequence } from "./ledger.js";

interface Asked {
  hash?: {
    fingerprint: string;
    layout: string;
    adapter: string;
    namespace: string;
    block_size: number;
    tokens: number[];
    extra_keys: string[][];
  };
  state?: {
    sequences: { id: string; token_count: number; committed_token_count: number; namespace: string; tables: number[][] }[];
    after_step: number;
  };
  spec?: JsonValue;
  step?: JsonValue;
  reply?: JsonValue;
}

const bytes = (hex: string): Uint8Array => Buffer.from(hex, "hex");
const hex = (data: Uint8Array): string => Buffer.from(data).toString("hex");
let ledger: Ledger;

function answer({ hash, state, spec, step, reply }: Asked): object {
  if (hash) {
    const { layout, namespace, tokens, block_size, extra_keys } = hash;
    const root = rootDigest({ fingerprint: bytes(hash.fingerprint), layout, adapter: bytes(hash.adapter), namespace });
    const keys = extra_keys.map((block) => block.map(bytes));
    return { root: hex(root), digests: blockDigests(root, tokens, block_size, keys).map(hex) };
  }
  if (state) {
    const sequences = state.sequences.map((row): Sequence => {
      const [id, committedTokenCount] = [BigInt(row.id), row.committed_token_count];
      return { id, tokenCount: row.token_count, committedTokenCount, namespace: row.namespace, tables: row.tables };
    });
    return { digest: hex(state.after_step ? partDigest(sequences, BigInt(state.after_step)) : stateDigest(sequences)) };
  }
  if (spec) ledger = new Ledger(fromJson(PoolSpecSchema, spec));
  else if (step && reply) {
    const [sent, got] = [fromJson(StepSchema, step), fromJson(StepReplySchema, reply)];
    ledger.apply(sent, got);
    const told = hex(got.stateDigest);
    if (told && told !== hex(ledger.digestAfter(sent.number))) return { error: `the reply has another digest: ${told}` };
  } else return { error: "an owner of level 1 makes no reports" };
  return { digest: hex(ledger.digest()) };
}

for await (const line of createInterface({ input: process.stdin })) {
  try {
    console.log(JSON.stringify(answer(JSON.parse(line))));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }));
  }
}
