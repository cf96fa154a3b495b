// gRPC for protobuf-es: calls any method by its descriptor, and gives errors their reason.

import type { DescMessage, DescMethodServerStreaming, DescMethodUnary, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { BinaryReader } from "@bufbuild/protobuf/wire";
import * as grpc from "@grpc/grpc-js";

const MESSAGE_BYTES_MAX = 2 << 20;
const DOMAIN = "quire.dev";

/** A call failed. `reason` is the name of a Reason of errors.proto, or empty for an error of gRPC itself. */
export class CallError extends Error {
  readonly code: grpc.status;
  readonly reason: string;

  constructor(error: grpc.ServiceError) {
    super(error.details);
    this.code = error.code;
    this.reason = reasonOf(error);
  }

  /** Returns whether no server answered: the call may or may not have been served. */
  get isUnanswered(): boolean {
    return this.code === grpc.status.UNAVAILABLE || this.code === grpc.status.DEADLINE_EXCEEDED;
  }
}

/** A connection to one server. */
export class Calls {
  readonly #client: grpc.Client;

  constructor(address: string, credentials = grpc.credentials.createInsecure()) {
    this.#client = new grpc.Client(address, credentials, {
      "grpc.max_receive_message_length": MESSAGE_BYTES_MAX,
      "grpc.max_reconnect_backoff_ms": 500, // finds a restarted allocator soon
      "grpc.enable_retries": 0,
    });
  }

  close(): void {
    this.#client.close();
  }

  unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    timeoutMs = 5_000,
  ): Promise<MessageShape<O>> {
    const deadline = Date.now() + timeoutMs;
    return new Promise((resolve, reject) => {
      this.#client.makeUnaryRequest(
        pathOf(method),
        (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
        (bytes) => fromBinary(method.output, bytes),
        create(method.input, request),
        { deadline },
        (error, reply) => (error ? reject(new CallError(error)) : resolve(reply!)),
      );
    });
  }

  /** Yields the messages of a stream. Raises an error after `silenceMs` of silence. */
  async *stream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: MessageInitShape<I>,
    silenceMs: number,
  ): AsyncGenerator<MessageShape<O>> {
    const call = this.#client.makeServerStreamRequest(
      pathOf(method),
      (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
      (bytes) => fromBinary(method.output, bytes),
      create(method.input, request),
    );
    const silence = setTimeout(() => call.cancel(), silenceMs);
    try {
      for await (const message of call) {
        silence.refresh();
        yield message as MessageShape<O>;
      }
    } catch (error) {
      throw new CallError(error as grpc.ServiceError);
    } finally {
      clearTimeout(silence);
      call.cancel();
    }
  }
}

function pathOf(method: { parent: { typeName: string }; name: string }): string {
  return `/${method.parent.typeName}/${method.name}`;
}

/** Returns the reason (1) of Quire's ErrorInfo, which is the value (2) of one of the details (3) of a google.rpc.Status. */
function reasonOf(error: grpc.ServiceError): string {
  const [status] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!(status instanceof Uint8Array)) return "";
  for (const detail of fieldsOf(status).get(3) ?? []) {
    const any = fieldsOf(detail);
    if (!text(any, 1).endsWith("/google.rpc.ErrorInfo")) continue;
    const info = fieldsOf(any.get(2)?.[0] ?? new Uint8Array());
    if (text(info, 2) === DOMAIN) return text(info, 1);
  }
  return "";
}

/** Returns a message's fields that are bytes, texts or messages, by number. */
function fieldsOf(bytes: Uint8Array): Map<number, Uint8Array[]> {
  const reader = new BinaryReader(bytes);
  const fields = new Map<number, Uint8Array[]>();
  while (reader.pos < reader.len) {
    const [number, type] = reader.tag();
    if (type === 2) fields.set(number, [...(fields.get(number) ?? []), reader.bytes()]);
    else reader.skip(type, number);
  }
  return fields;
}

function text(fields: Map<number, Uint8Array[]>, number: number): string {
  return Buffer.from(fields.get(number)?.[0] ?? []).toString();
}
