// A reader (level 0). It finds the published part of a prompt by a call, or in a mirror that events keep exact.

import { setTimeout as pause } from "node:timers/promises";
import { CallError, type Calls } from "./calls.js";
import { AllocatorService, GroupKind } from "./gen/quire/v1/allocator_pb.js";
import type { CacheEvent, PoolSpec } from "./gen/quire/v1/allocator_pb.js";
import { DIGEST_BYTES } from "./hash.js";
import { joined } from "./ledger.js";

const SILENCE_MS = 15_000; // `progress` comes every 5 s
const RETRY_MS = 100;

/** Returns the number of a prompt's leading tokens that a pool has published; 0 if no such pool is attached. */
export async function matched(calls: Calls, pool: string, digests: Uint8Array[], namespace = ""): Promise<number> {
  const request = { namespace, digests: joined(digests) };
  const { matches } = await calls.unary(AllocatorService.method.matchPrefix, request);
  return matches.find((match) => match.pool === pool)?.matchedTokenCount ?? 0;
}

/** The digests that a pool of full attention can hit. Other kinds of groups need their own rules (quire/mirror.py). */
export class Mirror {
  isExact = false; // true after a complete snapshot
  sessionId: Uint8Array = new Uint8Array();
  cursor = 0n; // cursor of the last event, from which the watch can continue
  readonly #blockSize: number;
  readonly #groups: number[];
  readonly #stored = new Map<string, Set<string>>(); // group and namespace -> digests
  #changed: (() => void)[] = [];

  constructor(spec: PoolSpec) {
    const isPlain = spec.groups.every(({ kind, blockSize }) => {
      return kind === GroupKind.FULL_ATTENTION && blockSize === spec.groups[0]!.blockSize;
    });
    if (!isPlain) throw new Error("this mirror knows pools of full attention with blocks of one size");
    this.#blockSize = spec.groups[0]!.blockSize;
    this.#groups = spec.groups.map((_, group) => group);
  }

  apply(event: CacheEvent): void {
    const { change } = event;
    if (change.case === "cleared") this.#clear();
    else if (change.case === "snapshotEnd") this.isExact = true;
    else if (change.case === "stored" || change.case === "removed") {
      const { namespace, digests } = change.value;
      for (const group of event.groups) {
        const stored = this.#of(group, namespace);
        for (let start = 0; start < digests.length; start += DIGEST_BYTES) {
          const key = Buffer.from(digests.subarray(start, start + DIGEST_BYTES)).toString("hex");
          if (change.case === "stored") stored.add(key);
          else stored.delete(key);
        }
      }
    }
    if (this.isExact) [this.sessionId, this.cursor] = [event.sessionId, event.cursor];
    const waiting = this.#changed;
    this.#changed = [];
    for (const tell of waiting) tell();
  }

  /** Returns the number of a prompt's leading tokens that every group can serve. */
  matched(digests: Uint8Array[], namespace = ""): number {
    const keys = digests.map((digest) => Buffer.from(digest).toString("hex"));
    const counts = this.#groups.map((group) => {
      const missing = keys.findIndex((key) => !this.#of(group, namespace).has(key));
      return missing < 0 ? keys.length : missing;
    });
    return Math.min(...counts) * this.#blockSize;
  }

  /** Waits for the next event. */
  change(): Promise<void> {
    return new Promise((resolve) => this.#changed.push(resolve));
  }

  #clear(): void {
    this.#stored.clear();
    this.isExact = false;
    [this.sessionId, this.cursor] = [new Uint8Array(), 0n];
  }

  #of(group: number, namespace: string): Set<string> {
    const key = `${group} ${namespace}`;
    if (!this.#stored.has(key)) this.#stored.set(key, new Set());
    return this.#stored.get(key)!;
  }
}

/** Keeps a mirror exact until the signal is aborted. It continues after the last event, or starts over with a snapshot. */
export async function watch(calls: Calls, pool: string, mirror: Mirror, signal: AbortSignal): Promise<void> {
  while (!signal.aborted) {
    const { sessionId, cursor } = mirror;
    try {
      const events = calls.stream(AllocatorService.method.watchEvents, { pool, sessionId, cursor }, SILENCE_MS);
      for await (const event of events) {
        if (signal.aborted) return;
        mirror.apply(event);
      }
    } catch (error) {
      if (!(error instanceof CallError)) throw error; // Other errors: no allocator, no pool yet, or this reader fell behind.
    }
    await pause(RETRY_MS);
  }
}
