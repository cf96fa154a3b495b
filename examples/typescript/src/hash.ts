// Digests of prompts (docs/hash.md). A reader needs them to ask for a prefix, an owner to publish one.

import { createHash } from "node:crypto";

export const DIGEST_BYTES = 32;

export interface Root {
  fingerprint: Uint8Array;
  layout: string;
  adapter?: Uint8Array;
  namespace?: string;
}

export function sha256(...parts: Uint8Array[]): Uint8Array {
  const hash = createHash("sha256");
  for (const part of parts) hash.update(part);
  return hash.digest();
}

/** Returns numbers as little-endian int32; uint32 has the same bytes. */
export function int32(numbers: readonly number[]): Uint8Array {
  const bytes = Buffer.alloc(4 * numbers.length);
  numbers.forEach((number, index) => bytes.writeInt32LE(number | 0, 4 * index));
  return bytes;
}

/** Returns the root: the digest of a prefix without tokens, for this model, layout, adapter and namespace. */
export function rootDigest({ fingerprint, layout, adapter = new Uint8Array(), namespace = "" }: Root): Uint8Array {
  const fields = [fingerprint, Buffer.from(layout), adapter, Buffer.from(namespace)];
  return sha256(Buffer.from("quire/2"), ...fields.flatMap(field));
}

/** Returns the digests of all full blocks of `tokens`. `extraKeys` has, per block, further bytes of its digest. */
export function blockDigests(
  root: Uint8Array,
  tokens: readonly number[],
  blockSize: number,
  extraKeys: readonly (readonly Uint8Array[])[] = [],
): Uint8Array[] {
  const digests: Uint8Array[] = [];
  let hash = createHash("sha256").update(root).update(int32([blockSize]));
  for (let block = 0; (block + 1) * blockSize <= tokens.length; block++) {
    const keys = extraKeys[block] ?? [];
    if (keys.length) {
      const start = sha256(Buffer.from("quire/2/keys"), digests[block - 1] ?? root, ...keys.flatMap(field));
      hash = createHash("sha256").update(start).update(int32([blockSize]));
    }
    hash.update(int32(tokens.slice(block * blockSize, (block + 1) * blockSize)));
    digests.push(hash.copy().digest());
  }
  return digests;
}

/** Returns the digests for looking up a prompt, so that at least one token is left to compute. */
export function promptDigests(root: Uint8Array, tokens: readonly number[], blockSize: number): Uint8Array[] {
  return blockDigests(root, tokens.slice(0, -1), blockSize);
}

function field(bytes: Uint8Array): Uint8Array[] {
  return [int32([bytes.length]), bytes];
}
