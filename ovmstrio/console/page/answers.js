// Output views: text, labels, image, table or JSON.

import { h, replace } from "./dom.js";
import { pictureForm } from "./files.js";

const MOST_ROWS = 40;
const MOST_COLUMNS = 24;
const TOP = 8;

function number(value) {
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e-4 && size < 1e6 ? value.toPrecision(6).replace(/\.?0+$/, "") : value.toExponential(4);
}

function asText(output) {
  return h("pre.answer", {}, output.data.map(String).join("\n"));
}

function asTable(output) {
  const columns = output.shape.length > 1 ? output.shape[output.shape.length - 1] : Math.min(output.data.length, 10);
  const rows = Math.ceil(output.data.length / Math.max(columns, 1));
  const body = h("tbody");
  for (let row = 0; row < Math.min(rows, MOST_ROWS); row++) {
    const values = output.data.slice(row * columns, row * columns + Math.min(columns, MOST_COLUMNS));
    body.append(h("tr", {}, h("th.number", { scope: "row" }, row), values.map((value) => h("td.number", {}, number(value)))));
  }
  const cut = rows > MOST_ROWS || columns > MOST_COLUMNS;
  return h("div", {}, h("div.scroll", {}, h("table.values", {}, body)), cut && h("p.quiet", {}, "The first " + Math.min(rows, MOST_ROWS) + " rows and " + Math.min(columns, MOST_COLUMNS) + " columns of " + rows + " × " + columns + "."));
}

function asLabels(output, labels) {
  const values = output.data.map(Number);
  const areParts = areShares(values);
  // A vocabulary has more values than a function may have arguments.
  const most = values.reduce((found, value) => Math.max(found, value), -Infinity);
  const least = values.reduce((found, value) => Math.min(found, value), 0);
  const best = values.map((value, index) => [value, index]).sort((a, b) => b[0] - a[0]).slice(0, TOP);
  return h("table.labels", {}, h("tbody", {}, best.map(([value, index]) => {
    const part = most > least ? (value - least) / (most - least) : 0;
    return h("tr", {}, h("th", { scope: "row" }, labels[index] || "class " + index),
      h("td", {}, h("span.bar-of", { css: { width: Math.max(part * 100, 0.5) + "%" } })),
      h("td.number", {}, areParts ? (value * 100).toFixed(1) + " %" : number(value)));
  })));
}

function areShares(data) {
  const values = data.map(Number);
  return values.every((value) => value >= 0 && value <= 1.0001) && Math.abs(values.reduce((total, value) => total + value, 0) - 1) < 0.02;
}

function asPicture(output) {
  const form = pictureForm(output.shape);
  const values = output.data.map(Number);
  let least = Infinity;
  let most = -Infinity;
  for (const value of values) { if (value < least) least = value; if (value > most) most = value; }
  const isBytes = least >= 0 && most <= 255 && most > 1;
  const scaled = isBytes ? (value) => value : (value) => ((value - least) / (most - least || 1)) * 255;
  const canvas = h("canvas", { width: form.width, height: form.height, role: "img", "aria-label": "Output " + output.name + " as an image" });
  const context = canvas.getContext("2d");
  const image = context.createImageData(form.width, form.height);
  const plane = form.height * form.width;
  for (let pixel = 0; pixel < plane; pixel++) {
    for (let channel = 0; channel < 3; channel++) {
      const own = form.channels === 1 ? 0 : channel;
      image.data[pixel * 4 + channel] = scaled(values[form.isLast ? pixel * form.channels + own : own * plane + pixel]);
    }
    image.data[pixel * 4 + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return h("div.picture", {}, canvas);
}

function asJson(output) {
  return h("pre.answer", {}, JSON.stringify(output, null, 1));
}

// Text of graphs: UINT8 bytes, optionally with KServe's length prefix.
function textOfBytes(output) {
  if (output.datatype !== "UINT8" || output.shape.length !== 1 || !output.data.length) return null;
  const bytes = Uint8Array.from(output.data);
  const size = bytes.length > 4 ? new DataView(bytes.buffer).getUint32(0, true) : -1;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(size === bytes.length - 4 ? bytes.slice(4) : bytes);
    return /[\u0000-\u0008\u000e-\u001f]/.test(text) ? null : text;
  } catch {
    return null;
  }
}

function formsOf(output, labels) {
  const forms = [];
  const text = textOfBytes(output);
  if (text !== null) forms.push(["text", () => h("pre.answer", {}, text)]);
  const isText = output.datatype === "BYTES";
  const count = output.data.length;
  const isVector = output.shape.filter((dim) => Number(dim) > 1).length === 1;
  const picture = pictureForm(output.shape);
  const isPicture = !isText && picture && picture.height > 7 && picture.width > 7 && Number(output.shape[0]) === 1;
  if (isText) forms.push(["text", asText]);
  if (isPicture) forms.push(["picture", asPicture]);
  if (!isText && isVector && count >= 2 && (labels.length || count >= 20 || areShares(output.data))) forms.push(["labels", (given) => asLabels(given, labels)]);
  forms.push(["table", asTable], ["JSON", asJson]);
  return forms;
}

export function outputView(output, labels) {
  const forms = formsOf(output, labels || []);
  const body = h("div", {});
  const show = (index) => {
    replace(body, forms[index][1](output));
    buttons.forEach((button, number) => button.setAttribute("aria-pressed", String(number === index)));
  };
  const buttons = forms.map(([name], index) => h("button.small", { type: "button", onclick: () => show(index) }, name));
  show(0);
  return h("div.output", {}, h("div.bar", {}, h("h3", {}, output.name), h("span.quiet.mono", {}, output.datatype + " [" + output.shape.join(", ") + "]"), h("span.segments", { role: "group", "aria-label": "Show as" }, buttons)), body);
}
