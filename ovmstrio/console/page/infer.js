// Inference requests over /v2.

import { ask, problemOf, readEvents } from "./api.js";

const HEADER = "inference-header-content-length";

export function path(name, how) {
  return "/v2/models/" + encodeURIComponent(name) + "/" + how;
}

export function documentOf(inputs) {
  return { inputs: inputs.map(({ name, shape, datatype, data }) => ({ name, shape, datatype, data })) };
}

function packed(inputs) {
  const blocks = [];
  const described = inputs.map((input) => {
    const { name, shape, datatype, data, bytes } = input;
    if (!bytes) return { name, shape, datatype, data };
    const block = new Uint8Array(4 + bytes.length);
    new DataView(block.buffer).setUint32(0, bytes.length, true);
    block.set(bytes, 4);
    blocks.push(block);
    return { name, shape, datatype, parameters: { binary_data_size: block.length } };
  });
  const head = new TextEncoder().encode(JSON.stringify({ inputs: described }));
  return { body: new Blob([head, ...blocks]), length: head.length };
}

export async function infer(name, inputs, signal) {
  const begun = performance.now();
  const headers = { "content-type": "application/json" };
  let body = "";
  if (inputs.some((input) => input.bytes)) {
    const made = packed(inputs);
    headers[HEADER] = String(made.length);
    headers["content-type"] = "application/octet-stream";
    body = made.body;
  } else body = JSON.stringify(documentOf(inputs));
  const answer = await ask(path(name, "infer"), { method: "POST", headers, body, signal });
  if (!answer.ok) throw new Error(await problemOf(answer));
  return { document: await answer.json(), milliseconds: performance.now() - begun };
}

// The nested JSON of a tensor, as text: whole values of a floating-point type keep a decimal point.
export function nested({ shape, datatype, data }) {
  const isFloat = datatype.startsWith("FP");
  const text = (value) => (isFloat && Number.isInteger(value) ? value.toFixed(1) : JSON.stringify(value));
  const level = (depth, start) => {
    if (depth === shape.length) return text(data[start]);
    const size = shape.slice(depth + 1).reduce((product, dim) => product * dim, 1);
    return "[" + Array.from({ length: shape[depth] }, (_, index) => level(depth + 1, start + index * size)).join(",") + "]";
  };
  return data.length === 1 && shape.length <= 1 ? text(data[0]) : level(0, 0);
}

export function generateBody(inputs) {
  if (inputs.some((input) => input.bytes)) throw new Error("a file of bytes cannot be sent as JSON to a stream; choose a single response");
  return "{" + inputs.map((input) => JSON.stringify(input.name) + ":" + nested(input)).join(",") + "}";
}

export async function generate(name, inputs, signal, take) {
  const answer = await ask(path(name, "generate_stream"), {
    method: "POST", headers: { "content-type": "application/json" }, body: generateBody(inputs), signal,
  });
  if (!answer.ok) throw new Error(await problemOf(answer));
  await readEvents(answer, (kind, text) => {
    const data = JSON.parse(text);
    if (kind === "error") throw new Error(data.error || text);
    take(data);
  });
}

export async function post(target, text, signal) {
  const begun = performance.now();
  const answer = await ask(target, { method: "POST", headers: { "content-type": "application/json" }, body: text, signal });
  return { ok: answer.ok, status: answer.status, text: await answer.text(), milliseconds: performance.now() - begun };
}
