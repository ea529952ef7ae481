// Test form: inputs of a service, its response, and the call to copy.

import { key, readEvents, ask, problemOf } from "./api.js";
import { outputView } from "./answers.js";
import { h, replace, setText } from "./dom.js";
import { readFile } from "./files.js";
import * as format from "./format.js";
import { documentOf, generate, infer, post } from "./infer.js";
import { chatSnippets, inferSnippets, postSnippets, snippetsView } from "./snippets.js";

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

function field(tensor) {
  const isText = tensor.datatype === "BYTES";
  const isOpen = tensor.datatype === "INVALID" || !tensor.datatype;
  const first = firstShape(tensor.shape.length ? tensor.shape : ["1"]);
  const size = first.reduce((product, dim) => product * dim, 1);
  const id = "in-" + Math.random().toString(36).slice(2);
  let dropped = null;
  const kind = isOpen && h("select", { "aria-label": "Type of " + tensor.name }, ["BYTES", "FP32", "INT64", "INT32", "UINT8", "BOOL"].map((each) => h("option", { value: each }, each)));
  const shape = h("input.mono", { value: first.join(", "), size: 14, "aria-label": "Shape of " + tensor.name, spellcheck: "false" });
  const values = h("textarea", { id, rows: isText || isOpen ? 2 : 3, spellcheck: "false", placeholder: isText ? "Text, or a JSON list of texts" : isOpen ? "Text or numbers" : "Numbers separated by commas or spaces, or JSON" });
  values.value = isText || isOpen ? "" : size <= 64 ? new Array(size).fill(0).join(", ") : "";
  const note = h("span.quiet");
  const chooser = h("input.visually-hidden", { type: "file", id: id + "-file", onchange() { if (chooser.files[0]) take(chooser.files[0]); } });
  const fill = (make) => {
    dropped = null;
    setText(note, "");
    const count = dims().reduce((product, dim) => product * dim, 1);
    if (count > MOST_VALUES) {
      dropped = { datatype: datatype(), shape: dims(), data: Array.from({ length: count }, make) };
      values.value = "";
      setText(note, format.count(count) + " values");
    } else values.value = Array.from({ length: count }, make).join(", ");
  };
  const random = () => (isWhole(datatype()) ? Math.floor(Math.random() * 10) : Number(Math.random().toFixed(4)));
  const zone = h("div.input", {
    ondragover(event) { event.preventDefault(); zone.classList.add("over"); },
    ondragleave() { zone.classList.remove("over"); },
    ondrop(event) { event.preventDefault(); zone.classList.remove("over"); if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]); },
  },
  h("div.bar", {}, h("label", { for: id }, tensor.name), kind || h("span.quiet.mono", {}, tensor.datatype), shape,
    !isText && !isOpen && [h("button.small", { type: "button", onclick: () => fill(() => 0) }, "zeros"), h("button.small", { type: "button", onclick: () => fill(random) }, "random")],
    chooser, h("label.file", { for: id + "-file" }, "file…"), note),
  values);

  async function take(file) {
    try {
      const made = await readFile(file, { ...tensor, datatype: datatype(), shape: tensor.shape.map((dim) => (Number(dim) > 0 ? Number(dim) : -1)) });
      dropped = made;
      shape.value = made.shape.join(", ");
      values.value = "";
      setText(note, file.name + ": " + made.datatype + " [" + made.shape.join(", ") + "]");
    } catch (error) {
      setText(note, error.message);
    }
  }

  values.addEventListener("input", () => { dropped = null; setText(note, ""); });

  function datatype() { return kind ? kind.value : tensor.datatype; }
  function dims() { return shape.value.split(/[\s,x×\[\]]+/).filter(Boolean).map(Number); }

  return {
    element: zone,
    read() {
      if (dropped) return { name: tensor.name, ...dropped };
      const type = datatype();
      const text = values.value;
      if (type === "BYTES") {
        let data = [text];
        if (text.trim().startsWith("[")) { try { data = JSON.parse(text).flat(Infinity).map(String); } catch { data = [text]; } }
        const given = dims();
        const fits = given.reduce((product, dim) => product * dim, 1) === data.length;
        return { name: tensor.name, datatype: type, shape: fits ? given : [data.length], data };
      }
      let data;
      if (/[\[{]/.test(text)) data = [JSON.parse(text)].flat(Infinity);
      else data = text.split(/[\s,;]+/).filter(Boolean).map((word) => (type === "BOOL" ? /^(1|true)$/i.test(word) : Number(word)));
      if (data.some((value) => typeof value === "number" && Number.isNaN(value))) throw new Error("input " + tensor.name + ": expected numbers only");
      const given = dims();
      const count = given.reduce((product, dim) => product * dim, 1);
      if (count !== data.length) throw new Error("input " + tensor.name + ": shape [" + given.join(", ") + "] needs " + count + " values, got " + data.length);
      return { name: tensor.name, datatype: type, shape: given, data };
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
      else result.append(h("p.problem", { role: "alert" }, error.message));
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
  const mode = () => (how ? how.value : "infer");
  const run = runner(async (result, signal) => {
    replace(result);
    const inputs = read();
    if (mode() === "stream") {
      const begun = performance.now();
      const facts = h("p.quiet");
      const texts = new Map();
      result.append(facts);
      let count = 0;
      await generate(document_.name, inputs, signal, (data) => {
        count++;
        setText(facts, format.plural(count, "chunk") + " in " + format.ms(performance.now() - begun));
        for (const [name, value] of Object.entries(data)) {
          if (["model_name", "model_version", "id", "parameters"].includes(name)) continue;
          if (!texts.has(name)) {
            const pre = h("pre.answer.stream");
            texts.set(name, pre);
            result.append(h("h3", {}, name), pre);
          }
          texts.get(name).append(typeof value === "string" ? value : JSON.stringify(value) + "\n");
        }
      });
      return;
    }
    const { document: answer, milliseconds } = await infer(document_.name, inputs, signal);
    replace(result, h("p.quiet", {}, "Version " + answer.model_version + " answered in " + format.ms(milliseconds) + ", network included."),
      (answer.outputs || []).map((output) => outputView(output, document_.labels)));
  });
  const snippets = snippetsView(() => inferSnippets(document_.name, read(), Boolean(key()), mode()));
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
