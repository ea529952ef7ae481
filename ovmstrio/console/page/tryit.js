// Test form: inputs of a service, its response, and the call to copy.

import { key, readEvents, ask, problemOf } from "./api.js";
import { outputView } from "./answers.js";
import { h, replace, setText } from "./dom.js";
import { readFile } from "./files.js";
import * as format from "./format.js";
import { documentOf, generate, infer, post } from "./infer.js";
import { chatSnippets, inferSnippets, postSnippets, snippetsView } from "./snippets.js";
import { FieldError, tensorFrom } from "./values.js";

const MOST_VALUES = 2000;
const isWhole = (datatype) => /^U?INT/.test(datatype);

function firstShape(shape) {
  return shape.map((dim) => {
    const fixed = Number(dim);
    if (fixed > 0) return fixed;
    const low = /^\[(\d+)~/.exec(dim);
    return low ? Math.max(Number(low[1]), 1) : 1;
  });
}

const OPEN_TYPES = ["BYTES", "INT64", "INT32", "UINT8", "FP32", "FP64", "BOOL"];

function field(tensor) {
  const isText = tensor.datatype === "BYTES";
  const isOpen = tensor.datatype === "INVALID" || !tensor.datatype;
  const first = firstShape(tensor.shape.length ? tensor.shape : ["1"]);
  const size = first.reduce((product, dim) => product * dim, 1);
  const id = "in-" + Math.random().toString(36).slice(2);
  let dropped = null;
  let isShapeWritten = false;
  const kind = isOpen && h("select", { "aria-label": "Type of " + tensor.name, onchange: describe }, h("option", { value: "" }, "type by value"), OPEN_TYPES.map((each) => h("option", { value: each }, each)));
  const shape = h("input.mono", { value: isOpen ? "" : first.join(", "), placeholder: "by value", size: 14, "aria-label": "Shape of " + tensor.name, spellcheck: "false", oninput() { isShapeWritten = shape.value.trim() !== ""; describe(); } });
  const values = h("textarea", { id, rows: isText || isOpen ? 2 : 3, spellcheck: "false", placeholder: isText ? "Text, or a JSON list of texts" : isOpen ? "Numbers, text or a JSON array: 3, or 1 2 3, or [[1, 2], [3, 4]]" : "Numbers separated by commas or spaces, or a JSON array" });
  values.value = isText || isOpen ? "" : size <= 64 ? new Array(size).fill(tensor.datatype === "BOOL" ? "false" : 0).join(", ") : "";
  const note = h("span.quiet", { id: id + "-note", role: "status" });
  const problem = h("p.problem", { id: id + "-problem", role: "alert", hidden: true });
  const chooser = h("input.visually-hidden", { type: "file", id: id + "-file", onchange() { if (chooser.files[0]) take(chooser.files[0]); } });
  const fill = (make) => {
    dropped = null;
    const wanted = dims() || first;
    const count = wanted.reduce((product, dim) => product * dim, 1);
    if (count > MOST_VALUES) {
      dropped = { datatype: datatype(), shape: wanted, data: Array.from({ length: count }, make) };
      values.value = "";
    } else values.value = Array.from({ length: count }, make).join(", ");
    describe();
  };
  const random = () => {
    if (datatype() === "BOOL") return Math.random() < 0.5;
    return isWhole(datatype()) ? Math.floor(Math.random() * 10) : Number(Math.random().toFixed(4));
  };
  const zone = h("div.input", {
    ondragover(event) { event.preventDefault(); zone.classList.add("over"); },
    ondragleave() { zone.classList.remove("over"); },
    ondrop(event) { event.preventDefault(); zone.classList.remove("over"); if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]); },
  },
  h("div.bar", {}, h("label", { for: id }, tensor.name), kind || h("span.quiet.mono", {}, tensor.datatype), shape,
    !isText && !isOpen && [h("button.small", { type: "button", onclick: () => fill(() => (datatype() === "BOOL" ? false : 0)) }, "zeros"), h("button.small", { type: "button", onclick: () => fill(random) }, "random")],
    chooser, h("label.file", { for: id + "-file" }, "file…"), note),
  values, problem);

  async function take(file) {
    try {
      const made = await readFile(file, { ...tensor, datatype: datatype() || "INVALID", shape: tensor.shape.map((dim) => (Number(dim) > 0 ? Number(dim) : -1)) });
      dropped = made;
      isShapeWritten = false;
      shape.value = made.shape.join(", ");
      values.value = "";
      show("");
      setText(note, file.name + ": " + made.datatype + " [" + made.shape.join(", ") + "]");
    } catch (error) {
      show(error.message);
    }
  }

  values.addEventListener("input", () => { dropped = null; describe(); });
  values.setAttribute("aria-describedby", note.id + " " + problem.id);

  function show(text) {
    setText(problem, text);
    problem.hidden = !text;
    if (text) values.setAttribute("aria-invalid", "true");
    else values.removeAttribute("aria-invalid");
  }

  // Shows what will be sent while the reader types; problems wait for the call, unless one is shown.
  function describe() {
    let text = "";
    try {
      if (values.value.trim() || dropped) {
        const made = make();
        text = made.datatype + " [" + made.shape.join(", ") + "]";
        if (!isShapeWritten && !dropped) shape.value = made.shape.join(", ");
      } else if (!isShapeWritten && isOpen) shape.value = "";
      show("");
    } catch (error) {
      if (!problem.hidden) show(error.message);
    }
    setText(note, text);
  }

  function datatype() { return kind ? kind.value : tensor.datatype; }

  function dims() {
    const parts = shape.value.split(/[\s,x×\[\]]+/).filter(Boolean);
    if (!parts.length) return null;
    const found = parts.map(Number);
    if (found.some((dim) => !Number.isInteger(dim) || dim < 0)) throw new FieldError("input " + tensor.name + ", shape: expected numbers such as 1, 10, got " + shape.value);
    return found;
  }

  function make() {
    if (dropped) return { name: tensor.name, ...dropped };
    return tensorFrom(values.value, tensor, datatype(), isShapeWritten ? dims() : null);
  }

  return {
    element: zone,
    make,
    // Returns the tensor; shows a problem at the field.
    read() {
      try {
        const made = make();
        show("");
        return made;
      } catch (error) {
        if (!(error instanceof FieldError)) throw error;
        show(error.message);
        values.focus();
        throw error;
      }
    },
  };
}

function runner(start) {
  let under = null;
  const result = h("div.result", { "aria-live": "polite" });
  const send = h("button.primary", { type: "submit" }, "Send");
  const stop = h("button", { type: "button", disabled: true, onclick: () => under && under.abort() }, "Stop");
  async function run() {
    if (under) under.abort();
    const mine = under = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    try {
      await start(result, mine.signal);
    } catch (error) {
      if (mine.signal.aborted) result.append(h("p.quiet", {}, "Stopped."));
      else if (!(error instanceof FieldError)) result.append(h("p.problem", { role: "alert" }, error.message));
    } finally {
      send.disabled = false;
      stop.disabled = true;
    }
  }
  return { result, send, stop, run, close() { if (under) under.abort(); } };
}

function tensorForm(document_) {
  const fields = document_.inputs.map(field);
  const mayStream = document_.takes.includes("streams");
  const how = mayStream && h("select", { "aria-label": "How" }, h("option", { value: "infer" }, "single response"), h("option", { value: "stream" }, "stream"));
  const read = () => fields.map((each) => each.read());
  const described = () => fields.map((each) => each.make());
  const mode = () => (how ? how.value : "infer");
  const run = runner(async (result, signal) => {
    replace(result);
    const inputs = read();
    if (mode() === "stream") {
      const begun = performance.now();
      const facts = h("p.quiet");
      const pieces = new Map();
      result.append(facts);
      let count = 0;
      await generate(document_.name, inputs, signal, (data) => {
        const after = format.ms(performance.now() - begun);
        count++;
        setText(facts, format.plural(count, "piece") + " in " + after);
        for (const [name, value] of Object.entries(data)) {
          if (["model_name", "model_version", "id", "parameters"].includes(name)) continue;
          if (!pieces.has(name)) {
            const list = h("pre.answer.stream", { tabindex: 0, "aria-label": "Pieces of " + name });
            pieces.set(name, list);
            result.append(h("h3", {}, name), list);
          }
          const list = pieces.get(name);
          list.append(h("span.piece", { title: "piece " + count + " after " + after }, typeof value === "string" ? value : JSON.stringify(value)));
          list.scrollTop = list.scrollHeight;
        }
      });
      setText(facts, facts.textContent ? facts.textContent + ", complete" : "The stream ended without a piece.");
      return;
    }
    const { document: answer, milliseconds } = await infer(document_.name, inputs, signal);
    replace(result, h("p.quiet", {}, "Version " + answer.model_version + " answered in " + format.ms(milliseconds) + ", network included."),
      (answer.outputs || []).map((output) => outputView(output, document_.labels)));
  });
  const snippets = snippetsView(() => inferSnippets(document_.name, described(), Boolean(key()), mode()));
  const form = h("form.try", { onsubmit(event) { event.preventDefault(); run.run(); }, oninput() { snippets.refresh(); }, onchange() { snippets.refresh(); } },
    fields.map((each) => each.element), h("div.bar", {}, run.send, run.stop, how), run.result, snippets.element);
  return { element: form, close: run.close };
}

function bodyForm(document_) {
  const isOps = document_.kind === "op pipeline";
  const route = "/" + encodeURIComponent(document_.name) + (isOps ? "/prediction" : "");
  const target = h("input.mono", { value: route, "aria-label": "Path", spellcheck: "false" });
  const text = h("textarea", { rows: 5, spellcheck: "false", "aria-label": "Body, JSON" });
  text.value = isOps ? JSON.stringify({ key: ["x"], value: ["text"] }) : "{}";
  const run = runner(async (result, signal) => {
    replace(result);
    if (!target.value.startsWith("/")) throw new Error("the path must start with a slash");
    const answer = await post(target.value, text.value, signal);
    let shown = answer.text;
    try { shown = JSON.stringify(JSON.parse(answer.text), null, 1); } catch { shown = answer.text; }
    replace(result, h("p", { class: answer.ok ? "quiet" : "problem" }, "Status " + answer.status + " after " + format.ms(answer.milliseconds)), h("pre.answer", {}, shown));
  });
  const snippets = snippetsView(() => postSnippets(target.value, text.value, Boolean(key())));
  const form = h("form.try", { onsubmit(event) { event.preventDefault(); run.run(); }, oninput() { snippets.refresh(); } },
    h("div.bar", {}, h("span.mono", {}, "POST"), target), text, h("div.bar", {}, run.send, run.stop), run.result, snippets.element);
  return { element: form, close: run.close };
}

function chatForm(document_) {
  const messages = [];
  const log = h("div.chat", { role: "log", "aria-label": "Chat", tabindex: 0 });
  const text = h("textarea", { rows: 2, "aria-label": "Message", placeholder: "Message; Enter sends, Shift+Enter inserts a line" });
  const most = h("input", { type: "number", value: 256, min: 1, size: 6, "aria-label": "Maximum tokens" });
  const heat = h("input", { type: "number", value: 0.7, min: 0, max: 2, step: 0.1, size: 5, "aria-label": "Temperature" });
  const options = () => ({ max_tokens: Number(most.value) || 256, temperature: Number(heat.value) });
  const run = runner(async (result, signal) => {
    const message = text.value.trim();
    if (!message) return;
    replace(result);
    messages.push({ role: "user", content: message });
    log.append(h("div.said.user", {}, message));
    text.value = "";
    const grown = h("div.said.assistant");
    const facts = h("span.quiet");
    log.append(grown);
    const begun = performance.now();
    let first = 0;
    let count = 0;
    let content = "";
    let ended = "";
    try {
      const answer = await ask("/v3/chat/completions", {
        method: "POST", headers: { "content-type": "application/json" }, signal,
        body: JSON.stringify({ model: document_.name, messages, stream: true, ...options() }),
      });
      if (!answer.ok) throw new Error(await problemOf(answer));
      await readEvents(answer, (kind, data) => {
        if (data === "[DONE]") return;
        const piece = JSON.parse(data);
        if (piece.error) throw new Error(piece.error.message || String(piece.error));
        const choice = piece.choices && piece.choices[0];
        const delta = choice && choice.delta;
        ended = (choice && choice.finish_reason) || ended;
        const words = delta && (delta.content || delta.reasoning_content);
        if (!words) return;
        first = first || performance.now();
        count++;
        content += words;
        grown.append(words);
        setText(facts, "first token after " + format.ms(first - begun) + ", " + format.rate(count / Math.max((performance.now() - first) / 1000, 0.001)) + " chunks/s");
        log.scrollTop = log.scrollHeight;
      });
    } finally {
      if (content) messages.push({ role: "assistant", content });
      else grown.append(h("span.quiet", {}, ended ? "ended without text (" + ended + ")" : "no response"));
      replace(result, facts);
    }
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); run.run(); }
  });
  const snippets = snippetsView(() => chatSnippets(document_.name, messages.length ? messages : [{ role: "user", content: text.value || "Hello" }], options(), Boolean(key())));
  const form = h("form.try", { onsubmit(event) { event.preventDefault(); run.run(); }, oninput() { snippets.refresh(); } },
    log, text, h("div.bar", {}, run.send, run.stop, h("label", {}, "tokens ", most), h("label", {}, "temperature ", heat),
      h("button", { type: "button", onclick() { messages.length = 0; replace(log); replace(run.result); } }, "Clear")), run.result, snippets.element);
  return { element: form, close: run.close };
}

export function tryIt(document_) {
  const forms = [];
  if (document_.takes.includes("tensors") && document_.inputs.length) forms.push(["inputs", tensorForm]);
  else if (document_.takes.includes("http")) forms.push(["body", bodyForm]);
  if (document_.tasks && document_.tasks.includes("text_generation")) forms.push(["chat", chatForm]);
  if (forms.length < 2) return forms.length ? forms[0][1](document_) : null;
  const made = forms.map(([, make]) => make(document_));
  const show = (index) => made.forEach((each, number) => {
    each.element.hidden = number !== index;
    buttons[number].setAttribute("aria-pressed", String(number === index));
  });
  const buttons = forms.map(([name], index) => h("button.small", { type: "button", onclick: () => show(index) }, name));
  const element = h("div", {}, h("div.bar", {}, h("span.segments", { role: "group", "aria-label": "Request type" }, buttons)), made.map((each) => each.element));
  show(0);
  return { element, close() { made.forEach((each) => each.close()); } };
}

export { documentOf };
