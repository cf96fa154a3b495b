// A toy engine on an owner. Its pages hold tokens in place of keys and values, and its "model" reads every token
// through the block table: a wrong table, a lost copy or a stale page changes the text.

import { blockDigests, promptDigests, rootDigest } from "./hash.js";
import { joined, type Grown, type Sequence } from "./ledger.js";
import { PoolLostError, type Operations, type Outcome, type Owner } from "./owner.js";
import { Result } from "./gen/quire/v1/allocator_pb.js";

const VOCABULARY = 50_021;

const NONE = 0n; // no sequence has this id

interface Text {
  number: number;
  tokens: number[];
  namespace: string;
  sequence: bigint; // id at the allocator; NONE after the pool was lost, until the text gets a new id
  written: number; // tokens in the pages
}

/** The pool refused a sequence. `shortfall` is the number of missing blocks, if it had too few. */
export class RefusedError extends Error {
  constructor(readonly grown: Grown) {
    super(`${Result[grown.result] ?? grown.result}, ${grown.shortfall} blocks are missing`);
  }
}

export class Engine {
  readonly texts = new Map<number, Text>();
  readonly #pages: Int32Array;
  readonly #blockSize: number;
  #lastText = 0;

  constructor(readonly owner: Owner) {
    this.#blockSize = owner.spec.groups[0]!.blockSize;
    this.#pages = new Int32Array(owner.spec.blockCount * this.#blockSize);
  }

  /** Begins a text: shares its prompt's published prefix and computes the rest. Returns its number and the shared tokens. */
  async admit(prompt: number[], namespace = ""): Promise<{ text: number; matched: number }> {
    const text: Text = { number: this.#lastText + 1, tokens: [...prompt], namespace, sequence: NONE, written: 0 };
    const matched = await this.#surviving(() => this.#begin(text));
    this.texts.set(++this.#lastText, text);
    return { text: text.number, matched };
  }

  /** Adds a token to every text whose tokens are all in the pages, and computes it. */
  async decode(): Promise<void> {
    await this.#surviving(async () => undefined); // Texts whose readmission was refused try again.
    const texts = [...this.texts.values()];
    for (const text of texts) if (text.written === text.tokens.length) text.tokens.push(this.#model(text));
    await this.#surviving(() => this.#compute(texts));
  }

  /** Forks a text. The text and its fork share every block until one of the two writes to it. */
  async fork(of: number): Promise<number> {
    const parent = this.#text(of);
    const child: Text = { ...parent, number: ++this.#lastText, tokens: [...parent.tokens] };
    await this.#surviving(async () => {
      const id = this.owner.ledger.lastSequenceId + 1n;
      const forks = { parents: [parent.sequence], children: [id] };
      const { reply } = await this.#apply({ commits: this.#commits([parent]), forks });
      if (reply.forkResults.some((result) => result !== Result.OK)) throw new Error(`the fork was refused`);
      child.sequence = id;
      child.written = this.#sequence(child).committedTokenCount;
    });
    this.texts.set(child.number, child);
    return child.number;
  }

  async free(number: number): Promise<void> {
    const text = this.#text(number);
    await this.#surviving(() => this.#apply({ frees: { sequences: [text.sequence] } }));
    this.texts.delete(number);
  }

  /** Returns the digests for looking up a prompt. */
  digests(prompt: number[], namespace = ""): Uint8Array[] {
    return promptDigests(this.#root(namespace), prompt, this.#blockSize);
  }

  /** Does some work, and repeats it after the pool was lost. Admits texts without a sequence first. */
  async #surviving<T>(work: () => Promise<T>): Promise<T> {
    for (;;) {
      try {
        for (const text of this.texts.values()) if (text.sequence === NONE) await this.#begin(text);
        return await work();
      } catch (error) {
        if (!(error instanceof PoolLostError)) throw error;
        for (const text of this.texts.values()) text.sequence = NONE;
      }
    }
  }

  /** Admits a text under a new id, and computes its unshared tokens. Returns the number of shared tokens. */
  async #begin(text: Text): Promise<number> {
    const id = this.owner.ledger.lastSequenceId + 1n;
    const digests = this.digests(text.tokens, text.namespace);
    const { grows } = await this.#apply({
      grows: {
        sequences: [id],
        tokenCounts: [text.tokens.length],
        digestCounts: [digests.length],
        digests: joined(digests),
        namespaces: [text.namespace],
      },
    });
    const grown = grows[0]!;
    if (grown.result !== Result.OK) throw new RefusedError(grown);
    [text.sequence, text.written] = [id, grown.matchedTokenCount];
    this.#write(text);
    await this.#apply({ commits: this.#commits([text]) }); // Other texts can hit its prompt from now on.
    return grown.matchedTokenCount;
  }

  /** Commits the tokens in the pages and grows texts to all of their tokens, in one step; then writes these. */
  async #compute(texts: Text[]): Promise<void> {
    const growing = texts.filter((text) => text.tokens.length > this.#sequence(text).tokenCount);
    const sequences = growing.map((text) => text.sequence);
    const tokenCounts = growing.map((text) => text.tokens.length);
    const { grows } = await this.#apply({ commits: this.#commits(texts), grows: { sequences, tokenCounts } });
    for (const text of texts) if (this.#sequence(text).tokenCount >= text.tokens.length) this.#write(text);
    const refused = grows.find((grown) => grown.result !== Result.OK);
    if (refused) throw new RefusedError(refused);
  }

  /** Returns a commit for each text: the number of its tokens in the pages, and the digests of the filled blocks. */
  #commits(texts: Text[]): Operations["commits"] {
    const ready = texts.filter((text) => text.written > this.#sequence(text).committedTokenCount);
    const digests = ready.map((text) => {
      const all = blockDigests(this.#root(text.namespace), text.tokens.slice(0, text.written), this.#blockSize);
      return all.slice(Math.floor(this.#sequence(text).committedTokenCount / this.#blockSize));
    });
    return {
      sequences: ready.map((text) => text.sequence),
      tokenCounts: ready.map((text) => text.written),
      digestCounts: digests.map((each) => each.length),
      digests: joined(digests.flat()),
    };
  }

  /** Applies a step and runs its copies. Nothing is written to pages before the copies. */
  async #apply(operations: Operations): Promise<Outcome> {
    const outcome = await this.owner.step(operations);
    const copies = outcome.reply.copies;
    copies?.sources.forEach((source, row) => {
      const [from, to] = [this.#start(source), this.#start(copies.destinations[row]!)];
      this.#pages.copyWithin(to, from, from + this.#blockSize);
    });
    return outcome;
  }

  /** Runs the forward pass: writes each new token to its page. */
  #write(text: Text): void {
    for (; text.written < text.tokens.length; text.written++) {
      this.#pages[this.#slot(text, text.written)] = text.tokens[text.written]!;
    }
  }

  /** Returns the next token, computed from the text's number and all earlier tokens in the pages. */
  #model(text: Text): number {
    let state = text.number;
    for (let at = 0; at < text.tokens.length; at++) state = (state * 31 + this.#pages[this.#slot(text, at)]!) % VOCABULARY;
    return state;
  }

  #slot(text: Text, at: number): number {
    const block = this.#sequence(text).tables[0]![Math.floor(at / this.#blockSize)]!;
    return this.#start(block) + (at % this.#blockSize);
  }

  #start(block: number): number {
    return (block - this.owner.spec.firstBlockId) * this.#blockSize;
  }

  #root(namespace: string): Uint8Array {
    const { modelFingerprint, cacheLayout } = this.owner.spec;
    return rootDigest({ fingerprint: modelFingerprint, layout: cacheLayout, namespace });
  }

  #sequence(text: Text): Sequence {
    return this.owner.ledger.sequences.get(text.sequence)!;
  }

  #text(number: number): Text {
    const text = this.texts.get(number);
    if (!text) throw new Error(`there is no text ${number}`);
    return text;
  }
}
