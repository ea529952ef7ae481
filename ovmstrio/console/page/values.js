// Typed tensors from what a reader writes into the field of an input.

// Messages name the input; the form shows them at its field.
export class FieldError extends Error {}

const LIMITS = { INT8: [-128, 127], INT16: [-32768, 32767], INT32: [-2147483648, 2147483647], UINT8: [0, 255], UINT16: [0, 65535], UINT32: [0, 4294967295] };
const isWhole = (datatype) => /^U?INT/.test(datatype);
const product = (dims) => dims.reduce((count, dim) => count * dim, 1);
const listed = (dims) => "[" + dims.join(", ") + "]";

// Returns the elements and the shape of a JSON value; the shape is null if it is no array.
function elementsOf(value, name) {
  if (!Array.isArray(value)) return { data: [value], shape: null };
  const shape = [];
  for (let level = value; Array.isArray(level); level = level[0]) shape.push(level.length);
  const check = (level, depth) => {
    const isList = Array.isArray(level);
    if (isList !== depth < shape.length || (isList && level.length !== shape[depth])) throw new FieldError(name + ": all rows of an array must have the same length and depth");
    if (isList) level.forEach((each) => check(each, depth + 1));
  };
  check(value, 0);
  return { data: value.flat(Infinity), shape };
}

// Reads numbers, truth values, JSON, or a text; returns elements, and a shape if the text has one.
function parse(text, datatype, name) {
  const trimmed = text.trim();
  const isOpen = !datatype;
  if (datatype === "BYTES" || isOpen) {
    if (/^\[/.test(trimmed)) {
      let value;
      try { value = JSON.parse(trimmed); } catch (error) {
        // A text may begin with a bracket; a list with a mistake does not become a text.
        if (!/^\[\s*["\d[-]/.test(trimmed)) return { data: [text], shape: null };
        throw new FieldError(name + ": the list is not valid JSON: " + error.message);
      }
      const found = elementsOf(value, name);
      return datatype === "BYTES" ? { data: found.data.map((each) => (typeof each === "string" ? each : JSON.stringify(each))), shape: found.shape } : found;
    }
    if (datatype === "BYTES") return { data: [text], shape: null };
    if (/^(true|false)$/.test(trimmed)) return { data: [trimmed === "true"], shape: null };
    const words = trimmed.split(/[\s,;]+/).filter(Boolean);
    if (!words.length || words.some((word) => !/^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(word))) return { data: [text], shape: null };
    return { data: words.map(Number), shape: null, isDecimal: words.some((word) => /[.e]/i.test(word)) };
  }
  if (!trimmed) throw new FieldError(name + ": expected " + datatype + " values, got none");
  if (/^[[{]/.test(trimmed)) {
    let value;
    try { value = JSON.parse(trimmed); } catch (error) { throw new FieldError(name + ": the array is not valid JSON: " + error.message); }
    return elementsOf(value, name);
  }
  const read = datatype === "BOOL" ? (word) => ({ 0: false, 1: true, false: false, true: true })[word.toLowerCase()] ?? word : (word) => (Number.isNaN(Number(word)) ? word : Number(word));
  return { data: trimmed.split(/[\s,;]+/).filter(Boolean).map(read), shape: null };
}

// Whole numbers become INT64, other numbers FP64, truth values BOOL, and everything else BYTES.
function typeOf({ data, isDecimal }, name) {
  if (data.every((each) => typeof each === "boolean")) return "BOOL";
  if (data.every((each) => typeof each === "number")) return isDecimal || data.some((each) => !Number.isInteger(each)) ? "FP64" : "INT64";
  if (data.every((each) => typeof each === "string")) return "BYTES";
  throw new FieldError(name + ": expected an array of numbers, of true and false, or of texts only");
}

function checkElements(data, datatype, name) {
  if (datatype === "BYTES") return;
  data.forEach((value, index) => {
    const place = data.length > 1 ? " at position " + (index + 1) : "";
    const got = ", got " + JSON.stringify(value) + place;
    if (datatype === "BOOL") {
      if (typeof value !== "boolean") throw new FieldError(name + ": expected true or false" + got);
      return;
    }
    if (typeof value !== "number" || !Number.isFinite(value)) throw new FieldError(name + ": expected numbers only" + got);
    if (!isWhole(datatype)) return;
    if (!Number.isInteger(value)) throw new FieldError(name + ": expected whole numbers for " + datatype + got);
    const [least, most] = LIMITS[datatype] || [datatype === "UINT64" ? 0 : Number.MIN_SAFE_INTEGER, Number.MAX_SAFE_INTEGER];
    if (value < least || value > most) throw new FieldError(name + ": expected " + datatype + " from " + least + " to " + most + got);
  });
}

function fits(shape, wanted) {
  return shape.length === wanted.length && wanted.every((dim, index) => {
    const range = /^\[(\d+)~(\d+)\]$/.exec(dim);
    if (range) return shape[index] >= Number(range[1]) && shape[index] <= Number(range[2]);
    return !(Number(dim) >= 0) || Number(dim) === shape[index];
  });
}

// The shape of some elements: the written one, that of the array, or the input's with its first open dimension adapted.
function shapeOf({ data, shape }, wanted, written, what) {
  if (written) {
    if (product(written) !== data.length) throw new FieldError(what + " " + listed(written) + " needs " + product(written) + " values, got " + data.length);
    return written;
  }
  if (!wanted.length) return shape || [data.length];
  const expected = what + ": expected " + listed(wanted);
  if (shape && shape.length > 1) {
    if (fits(shape, wanted)) return shape;
    // An array without the batch axis.
    if (fits([1, ...shape], wanted)) return [1, ...shape];
    throw new FieldError(expected + ", got " + listed(shape));
  }
  const open = wanted.findIndex((dim) => !(Number(dim) >= 0));
  const dims = wanted.map((dim) => (Number(dim) >= 0 ? Number(dim) : Math.max(Number((/^\[(\d+)~/.exec(dim) || [])[1] || 1), 1)));
  if (open >= 0) dims[open] = data.length / product(dims.filter((_, index) => index !== open));
  if (product(dims) === data.length && dims.every(Number.isInteger) && fits(dims, wanted)) return dims;
  throw new FieldError(expected + ", got " + data.length + (data.length === 1 ? " value" : " values"));
}

// tensor: { name, shape } as the service describes it; datatype: "" for any; written: the shape in the field, or null.
export function tensorFrom(text, tensor, datatype, written) {
  const name = "input " + tensor.name;
  const parsed = parse(text, datatype, name);
  const type = datatype || typeOf(parsed, name);
  checkElements(parsed.data, type, name);
  const isLoose = type === "BYTES" && !parsed.shape && !written;
  const shape = isLoose && !tensor.shape.length ? [parsed.data.length] : shapeOf(parsed, tensor.shape, written, name + ", shape");
  return { name: tensor.name, datatype: type, shape, data: parsed.data };
}
