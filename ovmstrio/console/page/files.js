// Dropped files (numpy arrays, images, audio, JSON, text) as input tensors.

const NPY = {
  f4: ["FP32", Float32Array], f8: ["FP64", Float64Array], i1: ["INT8", Int8Array], i2: ["INT16", Int16Array], i4: ["INT32", Int32Array],
  i8: ["INT64", BigInt64Array], u1: ["UINT8", Uint8Array], u2: ["UINT16", Uint16Array], u4: ["UINT32", Uint32Array], u8: ["UINT64", BigUint64Array],
  b1: ["BOOL", Uint8Array],
};
const RATE = 16000;

export function readNpy(buffer) {
  const bytes = new Uint8Array(buffer);
  if (bytes.length < 12 || String.fromCharCode(...bytes.slice(1, 6)) !== "NUMPY") throw new Error("not a .npy file");
  const view = new DataView(buffer);
  const isLong = bytes[6] > 1;
  const length = isLong ? view.getUint32(8, true) : view.getUint16(8, true);
  const start = isLong ? 12 : 10;
  const head = new TextDecoder().decode(bytes.slice(start, start + length));
  const kind = /'descr':\s*'([<|=>])(\w+)'/.exec(head);
  const shape = /'shape':\s*\(([^)]*)\)/.exec(head);
  if (!kind || !shape) throw new Error("unreadable .npy header");
  if (kind[1] === ">") throw new Error("big-endian arrays are not supported");
  if (/'fortran_order':\s*True/.test(head)) throw new Error("Fortran-order arrays are not supported");
  const known = NPY[kind[2]];
  if (!known) throw new Error("element type " + kind[2] + " is not supported");
  const values = new known[1](buffer.slice(start + length));
  const numbers = known[0] === "BOOL" ? Array.from(values, Boolean) : Array.from(values, (value) => (typeof value === "bigint" ? Number(value) : value));
  return { datatype: known[0], shape: shape[1].split(",").map((part) => part.trim()).filter(Boolean).map(Number), data: numbers };
}

// Returns height, width and channel order of an image shape; null for any other shape.
export function pictureForm(shape) {
  const dims = shape.map(Number);
  if (dims.length < 3 || dims.length > 4) return null;
  const [a, b, c] = dims.slice(-3);
  if (c === 3 || c === 1) return { height: a, width: b, channels: c, isLast: true };
  if (a === 3 || a === 1) return { height: b, width: c, channels: a, isLast: false };
  return null;
}

export async function readPicture(file, shape, datatype) {
  const form = pictureForm(shape);
  if (!form) throw new Error("an image does not fit the shape [" + shape.join(", ") + "]");
  const bitmap = await createImageBitmap(file);
  const height = form.height > 0 ? form.height : bitmap.height;
  const width = form.width > 0 ? form.width : bitmap.width;
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0, width, height);
  const pixels = context.getImageData(0, 0, width, height).data;
  const data = new Array(height * width * form.channels);
  for (let pixel = 0; pixel < height * width; pixel++) {
    const at = pixel * 4;
    const values = form.channels === 3
      ? [pixels[at], pixels[at + 1], pixels[at + 2]]
      : [Math.round(0.299 * pixels[at] + 0.587 * pixels[at + 1] + 0.114 * pixels[at + 2])];
    values.forEach((value, channel) => {
      data[form.isLast ? pixel * form.channels + channel : channel * height * width + pixel] = value;
    });
  }
  const tail = form.isLast ? [height, width, form.channels] : [form.channels, height, width];
  return { datatype, shape: shape.length === 4 ? [1, ...tail] : tail, data };
}

export async function readSound(file, shape, datatype) {
  const context = new AudioContext({ sampleRate: RATE });
  try {
    const sound = await context.decodeAudioData(await file.arrayBuffer());
    const data = Array.from(sound.getChannelData(0));
    return { datatype, shape: shape.length > 1 ? [1, data.length] : [data.length], data };
  } finally {
    context.close();
  }
}

export async function readFile(file, tensor) {
  const name = file.name.toLowerCase();
  if (name.endsWith(".npy")) return readNpy(await file.arrayBuffer());
  if (name.endsWith(".json")) {
    const value = JSON.parse(await file.text());
    const shape = [];
    for (let level = value; Array.isArray(level); level = level[0]) shape.push(level.length);
    return { datatype: tensor.datatype, shape: shape.length ? shape : [1], data: [value].flat(Infinity) };
  }
  const takesBytes = tensor.datatype === "BYTES" || tensor.datatype === "INVALID";
  if (takesBytes && (file.type.startsWith("text/") || name.endsWith(".txt"))) return { datatype: "BYTES", shape: [1], data: [await file.text()] };
  if (takesBytes) return { datatype: "BYTES", shape: [1], bytes: new Uint8Array(await file.arrayBuffer()) };
  if (file.type.startsWith("image/")) return readPicture(file, tensor.shape, tensor.datatype);
  if (file.type.startsWith("audio/")) return readSound(file, tensor.shape, tensor.datatype);
  throw new Error(file.name + ": unsupported file type; expected .npy, .json, an image or audio");
}
