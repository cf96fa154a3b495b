// An owner of level 1: it has one pool, uses unary calls, and does not remember cached pages.
//
// Lifecycle:
//   1. open   OpenSession, repeated while the allocator is down or another owner's lease lives
//   2. step   Apply, one at a time. Without an answer, the same step is sent again: its number makes it idempotent
//   3. lost   the allocator restarted, or the lease ended, or its state differs: the owner opens a new, empty session, and
//             PoolLostError tells the caller to admit its sequences again
//   4. close  CloseSession: other owners can open the pool at once

import { randomUUID } from "node:crypto";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { CallError, type Calls } from "./calls.js";
import { AllocatorService, StepSchema } from "./gen/quire/v1/allocator_pb.js";
import type { OpenSessionResponse, PoolSpec, StepReply } from "./gen/quire/v1/allocator_pb.js";
import { Ledger, type Grown } from "./ledger.js";

const PROTOCOL_VERSION = 3;
const RETRY_MS = 100;
const LATER = new Set(["POOL_OWNED", "DRAINING", "LIMIT", "POOL_QUARANTINED"]); // opening may succeed later
// Reasons of a refused step that mean that the pool is lost.
const LOST = new Set(["SESSION_UNKNOWN", "STEP_MISMATCH", "STEP_GAP", "FENCED", "POOL_QUARANTINED"]);

/** The pool was lost. It is open again and empty: no sequence is left. */
export class PoolLostError extends Error {}

export type Operations = Omit<MessageInitShape<typeof StepSchema>, "$typeName" | "sessionId" | "number" | "ack">;

/** The outcome of a step: its reply, and the outcomes of its grows. */
export interface Outcome {
  reply: StepReply;
  grows: Grown[];
}

export class Owner {
  ledger: Ledger;
  openCount = 0; // number of sessions so far; each begins with an empty pool
  #session!: OpenSessionResponse;
  #number = 0n; // number of the next step
  #turn: Promise<unknown> = Promise.resolve(); // steps and renewals go one at a time
  #keepAlive?: NodeJS.Timeout;
  #isClosed = false;

  private constructor(
    readonly calls: Calls,
    readonly pool: string,
    readonly spec: PoolSpec,
  ) {
    this.ledger = new Ledger(spec);
  }

  /** Opens a pool, waiting until it is free and the allocator answers. */
  static async open(calls: Calls, pool: string, spec: PoolSpec): Promise<Owner> {
    const owner = new Owner(calls, pool, spec);
    await owner.#open();
    return owner;
  }

  /** Applies a step exactly once. Rejects with PoolLostError if the pool was lost instead. */
  step(operations: Operations): Promise<Outcome> {
    return this.#inTurn(() => this.#apply(operations));
  }

  /** Gives the pool back. */
  async close(): Promise<void> {
    this.#isClosed = true;
    clearInterval(this.#keepAlive);
    await this.#inTurn(() => this.calls.unary(AllocatorService.method.closeSession, { sessionId: this.#session.sessionId }));
  }

  async #open(): Promise<void> {
    const request = { requestId: randomUUID(), pool: this.pool, spec: this.spec, version: PROTOCOL_VERSION };
    this.#session = await this.#answered((error) => LATER.has(error.reason), () =>
      this.calls.unary(AllocatorService.method.openSession, request),
    );
    const missing = this.spec.features.filter((feature) => !this.#session.features.includes(feature));
    if (missing.length) throw new Error(`the allocator does not know ${missing.join(", ")}`);
    this.ledger = new Ledger(this.spec);
    this.ledger.lastSequenceId = this.#session.lastSequenceId;
    this.#number = this.#session.nextStep;
    this.openCount++;
    clearInterval(this.#keepAlive);
    this.#keepAlive = setInterval(() => void this.#inTurn(() => this.#renew()), this.#session.leaseMs / 3).unref();
  }

  async #apply(operations: Operations): Promise<Outcome> {
    const step = create(StepSchema, { ...operations, sessionId: this.#session.sessionId, number: this.#number });
    let reply: StepReply;
    try {
      reply = await this.#answered(() => false, () => this.calls.unary(AllocatorService.method.apply, step));
    } catch (error) {
      if (!(error instanceof CallError && LOST.has(error.reason))) throw error; // The step was refused and changed nothing.
      return this.#lose(error.reason);
    }
    this.#number++;
    const grows = this.ledger.apply(step, reply);
    const told = reply.stateDigest;
    if (told.length && Buffer.compare(told, this.ledger.digestAfter(step.number))) return this.#lose("another state");
    return { reply, grows };
  }

  async #lose(why: string): Promise<never> {
    const sessionId = this.#session.sessionId;
    await this.calls.unary(AllocatorService.method.closeSession, { sessionId }).catch(() => undefined); // else the lease ends
    await this.#open();
    throw new PoolLostError(`the pool was lost (${why}), and is open and empty again`);
  }

  /** Renews the lease. The next step notices a failure. */
  async #renew(): Promise<void> {
    const sessionId = this.#session.sessionId;
    await this.calls.unary(AllocatorService.method.apply, { sessionId }).catch(() => undefined);
  }

  /** Repeats a call until it succeeds or fails with a permanent error. */
  async #answered<T>(mayPass: (error: CallError) => boolean, call: () => Promise<T>): Promise<T> {
    for (;;) {
      try {
        return await call();
      } catch (error) {
        const again = error instanceof CallError && (error.isUnanswered || mayPass(error));
        if (!again || this.#isClosed) throw error;
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  }

  #inTurn<T>(work: () => Promise<T>): Promise<T> {
    const turn = this.#turn.then(work, work);
    this.#turn = turn.catch(() => undefined);
    return turn;
  }
}
