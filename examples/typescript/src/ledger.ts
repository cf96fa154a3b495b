// The owner's ledger: the block tables of one pool, updated by each step and its reply.
//
// An owner of level 1 keeps only this ledger. A report would also need the cached pages without a live sequence, and
// only the allocator knows those here. In Python, client/quire/session/pages.py remembers them.

import { DIGEST_BYTES, int32, sha256 } from "./hash.js";
import type { GroupSpec, PoolSpec, Step, StepReply } from "./gen/quire/v1/allocator_pb.js";
import { GroupKind, Result } from "./gen/quire/v1/allocator_pb.js";

export const NULL_BLOCK = 0xffffffff; // entry of a block that fell out of a window
const DIGEST_STEPS = 64; // A reply has a digest each time this many steps are done.
const DIGEST_ENTRIES_MAX = 16_384; // about the number of table entries that a digest covers
const SEQUENCE_ENTRIES = 128; // a sequence itself counts as this many entries
const GOLDEN = 0x9e3779b9;

/** One live sequence: the tokens that it can hold, its committed tokens, and a table per group. */
export interface Sequence {
  id: bigint;
  tokenCount: number;
  committedTokenCount: number;
  namespace: string;
  tables: number[][];
}

/** The outcome of a grow. Any result but OK, also an unknown one, means that nothing changed. */
export interface Grown {
  result: Result;
  matchedTokenCount: number;
  shortfall: number; // number of missing blocks, with NO_SPACE
  stops: number[]; // token counts at which passes should end, so that later prompts hit
}

export class Ledger {
  readonly sequences = new Map<bigint, Sequence>(); // in the order of their ids
  lastSequenceId = 0n;
  readonly #groups: GroupSpec[];
  readonly #appendOnly: boolean;
  readonly #twins = new Map<Sequence, { group: number; index: number; block: number }[]>(); // only in append-only pools

  constructor(spec: PoolSpec) {
    this.#groups = spec.groups;
    this.#appendOnly = spec.features.includes("append-only");
  }

  /** Applies a step's reply to the tables, once for every step, in order. Returns the outcomes of its grows. */
  apply(step: Step, reply: StepReply): Grown[] {
    this.#commit(step, reply);
    step.frees?.sequences.forEach((id, row) => {
      if (isOk(reply.freeResults, row)) this.#free(id);
    });
    step.forks?.parents.forEach((parent, row) => {
      if (isOk(reply.forkResults, row)) this.#fork(this.#live(parent), step.forks!.children[row]!);
    });
    reply.takeovers?.sequences.forEach((id, row) => {
      const [group, first] = [reply.takeovers!.groups[row]!, reply.takeovers!.indices[row]!];
      this.#forgetTwins(this.#live(id), (twin) => twin.group === group && twin.index >= first);
    });
    return this.#grow(step, reply);
  }

  /** Returns the digest of the whole state (docs/session.md). */
  digest(): Uint8Array {
    return stateDigest(this.sequences.values());
  }

  /** Returns the digest that the reply to a step must have, if its number is a multiple of 64. */
  digestAfter(number: bigint): Uint8Array {
    return partDigest([...this.sequences.values()], number);
  }

  #commit({ commits }: Step, reply: StepReply): void {
    const swaps = reply.swaps;
    swaps?.commits.forEach((row, at) => {
      const sequence = this.#live(commits!.sequences[row]!);
      const [group, index, block] = [swaps.groups[at]!, swaps.indices[at]!, swaps.blocks[at]!];
      if (this.#appendOnly) this.#twins.set(sequence, [...(this.#twins.get(sequence) ?? []), { group, index, block }]);
      else sequence.tables[group]![this.#groups[group]!.kind === GroupKind.STATE ? 0 : index] = block;
    });
    commits?.sequences.forEach((id, row) => {
      if (!isOk(reply.commitResults, row)) return;
      const sequence = this.#live(id);
      const committed = commits.tokenCounts[row]!;
      const keep = commits.keepTokenCounts[row] || sequence.tokenCount;
      sequence.committedTokenCount = committed;
      sequence.tokenCount = Math.min(sequence.tokenCount, Math.max(keep, committed));
      this.#groups.forEach((spec, group) => {
        const table = sequence.tables[group]!;
        if (spec.kind === GroupKind.STATE) return;
        table.splice(Math.ceil(sequence.tokenCount / spec.blockSize));
        const gone = Math.min(table.length, Math.floor(firstNeeded(spec, committed) / spec.blockSize));
        table.fill(NULL_BLOCK, 0, gone);
        this.#forgetTwins(sequence, (twin) => twin.group === group && twin.index < gone);
      });
    });
  }

  #free(id: bigint): void {
    this.#twins.delete(this.#live(id));
    this.sequences.delete(id);
  }

  #fork(parent: Sequence, id: bigint): void {
    const length = parent.committedTokenCount;
    const tables = parent.tables.map((table, group) => {
      const copy = [...table];
      for (const twin of this.#twins.get(parent) ?? []) if (twin.group === group) copy[twin.index] = twin.block;
      const spec = this.#groups[group]!;
      return spec.kind === GroupKind.STATE ? copy : copy.slice(0, Math.ceil(length / spec.blockSize));
    });
    this.#add({ id, tokenCount: length, committedTokenCount: length, namespace: parent.namespace, tables });
  }

  #grow({ grows }: Step, reply: StepReply): Grown[] {
    const granted = this.#granted(reply);
    let stop = 0;
    return (grows?.sequences ?? []).map((id, row) => {
      const matched = reply.matchedTokenCounts[row] ?? 0;
      const stops = reply.stops?.tokenCounts.slice(stop, (stop += reply.stops.counts[row] ?? 0)) ?? [];
      const result = reply.growResults[row] ?? Result.OK;
      if (result === Result.OK) {
        const wanted = grows!.tokenCounts[row]!;
        const added = granted.get(row) ?? this.#groups.map(() => []);
        const sequence = this.sequences.get(id);
        if (sequence) this.#extend(sequence, wanted, added);
        else {
          const namespace = grows!.namespaces[grows!.namespaceIndices[row] ?? 0] ?? "";
          const tokenCount = Math.max(wanted, matched);
          this.#add({ id, tokenCount, committedTokenCount: matched, namespace, tables: added });
        }
      }
      return { result, matchedTokenCount: matched, shortfall: reply.refusals?.shortfalls[row] ?? 0, stops };
    });
  }

  /** Puts granted blocks into the tables: they are the last entries, up to the one that holds token `wanted - 1`. */
  #extend(sequence: Sequence, wanted: number, added: number[][]): void {
    added.forEach((blocks, group) => {
      const spec = this.#groups[group]!;
      const end = spec.kind === GroupKind.STATE ? 1 : Math.ceil(wanted / spec.blockSize);
      if (blocks.length) sequence.tables[group]!.splice(end - blocks.length, Infinity, ...blocks);
    });
    sequence.tokenCount = Math.max(sequence.tokenCount, wanted);
  }

  /** Returns the granted blocks of each grow, by its row, group by group. */
  #granted(reply: StepReply): Map<number, number[][]> {
    let [count, block] = [0, 0];
    const rows = reply.grantedGrows.map((row): [number, number[][]] => {
      const tables = this.#groups.map(() => reply.blocks.slice(block, (block += reply.blockCounts[count++]!)));
      return [row, tables];
    });
    return new Map(rows);
  }

  #add(sequence: Sequence): void {
    this.sequences.set(sequence.id, sequence);
    this.lastSequenceId = sequence.id;
  }

  #live(id: bigint): Sequence {
    const sequence = this.sequences.get(id);
    if (!sequence) throw new Error(`a reply is about sequence ${id}, which is not live`);
    return sequence;
  }

  #forgetTwins(sequence: Sequence, isGone: (twin: { group: number; index: number }) => boolean): void {
    const twins = this.#twins.get(sequence);
    if (twins) this.#twins.set(sequence, twins.filter((twin) => !isGone(twin)));
  }
}

/** Returns the digest of sequences by rising id, up to `entriesMax` entries. */
export function stateDigest(sequences: Iterable<Sequence>, entriesMax = Infinity): Uint8Array {
  const parts: Uint8Array[] = [];
  let entryCount = 0;
  for (const { id, tokenCount, committedTokenCount, namespace, tables } of sequences) {
    const name = Buffer.from(namespace);
    const words = [Number(id & 0xffffffffn), Number(id >> 32n), tokenCount, committedTokenCount, name.length];
    parts.push(int32(words), name, ...tables.flatMap((table) => [int32([table.length]), int32(table)]));
    entryCount += SEQUENCE_ENTRIES + tables.reduce((sum, table) => sum + table.length, 0);
    if (entryCount >= entriesMax) break;
  }
  return sha256(...parts);
}

/** Returns a reply's digest: it covers sequences from a moving start, until there are enough entries. */
export function partDigest(sequences: readonly Sequence[], number: bigint): Uint8Array {
  const fraction = ((number / BigInt(DIGEST_STEPS)) * BigInt(GOLDEN)) % 2n ** 32n;
  const start = Number((fraction * BigInt(sequences.length)) >> 32n);
  return stateDigest([...sequences.slice(start), ...sequences.slice(0, start)], DIGEST_ENTRIES_MAX);
}

/** Returns digests as they are sent, concatenated. */
export function joined(digests: readonly Uint8Array[]): Uint8Array {
  return Buffer.concat(digests, DIGEST_BYTES * digests.length);
}

/** Returns the first token that the token after `tokenCount` tokens still reads. */
function firstNeeded(spec: GroupSpec, tokenCount: number): number {
  if (spec.kind === GroupKind.SLIDING_WINDOW) return Math.max(0, tokenCount - spec.window + 1);
  return spec.kind === GroupKind.CHUNKED_LOCAL ? Math.floor(tokenCount / spec.window) * spec.window : 0;
}

/** Returns whether a result is OK. A column with only OK is sent empty. */
function isOk(results: readonly Result[], row: number): boolean {
  return (results[row] ?? Result.OK) === Result.OK;
}
