// Copyable calls: curl, Python and the ovms command.

import { h, notice, replace } from "./dom.js";
import { generateBody, nested } from "./infer.js";

const LONG = 400;
const NUMPY = {
  FP32: "float32", FP64: "float64", FP16: "float16", INT8: "int8", INT16: "int16", INT32: "int32", INT64: "int64", UINT8: "uint8",
  UINT16: "uint16", UINT32: "uint32", UINT64: "uint64", BOOL: "bool", BYTES: "object",
};

const NAMES = new Map([[true, "True"], [false, "False"], [null, "None"]]);

function py(value) {
  if (NAMES.has(value)) return NAMES.get(value);
  if (Array.isArray(value)) return "[" + value.map(py).join(", ") + "]";
  if (typeof value !== "object") return JSON.stringify(value);
  return "{" + Object.entries(value).map(([key, each]) => JSON.stringify(key) + ": " + py(each)).join(", ") + "}";
}

const sh = (text) => "'" + String(text).replaceAll("'", "'\\''") + "'";

function short(data) {
  const text = JSON.stringify(data);
  return text && text.length <= LONG;
}

function keyLine(isKeyed) {
  return isKeyed ? "  -H \"authorization: Bearer $KEY\" \\\n" : "";
}

export function inferSnippets(name, inputs, isKeyed, how) {
  const origin = location.origin;
  const document_ = { inputs: inputs.map(({ name: input, shape, datatype, data }) => ({ name: input, shape, datatype, data: short(data) ? data : ["..."] })) };
  const isStream = how === "stream";
  const body = isStream ? generateBody(inputs.map((input) => (short(input.data) ? input : { name: input.name, shape: [1], datatype: "BYTES", data: ["..."] }))) : JSON.stringify(document_);
  const curl = "curl " + (isStream ? "-N " : "") + sh(origin + "/v2/models/" + encodeURIComponent(name) + (isStream ? "/generate_stream" : "/infer")) + " \\\n" + keyLine(isKeyed) + "  -H 'content-type: application/json' \\\n  -d " + sh(body);
  const lines = ["import numpy as np", "import tritonclient.http as triton", "", "client = triton.InferenceServerClient(" + py(location.host) + ")", "inputs = []"];
  for (const input of inputs) {
    const kind = NUMPY[input.datatype] || "float32";
    const shape = "(" + input.shape.join(", ") + (input.shape.length === 1 ? ",)" : ")");
    const values = short(input.data) ? "np.array(" + py(input.data) + ", dtype=np." + kind + ").reshape" + shape : "np.zeros(" + shape + ", dtype=np." + kind + ")";
    lines.push("given = triton.InferInput(" + py(input.name) + ", [" + input.shape.join(", ") + "], " + py(input.datatype) + ")", "given.set_data_from_numpy(" + values + ")", "inputs.append(given)");
  }
  const headers = isKeyed ? ", headers={\"authorization\": \"Bearer \" + key}" : "";
  lines.push("answer = client.infer(" + py(name) + ", inputs" + headers + ")", "for output in answer.get_response()[\"outputs\"]:", "    print(output[\"name\"], answer.as_numpy(output[\"name\"]))");
  // One short array is piped as JSON; the files of other inputs are to be made by the reader.
  const isPiped = inputs.length === 1 && inputs[0].datatype !== "BYTES" && short(inputs[0].data);
  const piped = isPiped ? "echo " + sh(nested(inputs[0]).replace(/^[^[].*/, "[$&]")) + " | " : "";
  const given = isPiped ? " --input -" : inputs.map((input) => " --input " + sh((inputs.length > 1 ? input.name + "=" : "") + (input.datatype === "BYTES" && input.data && input.data.length === 1 ? input.data[0] : input.name + ".npy"))).join("");
  const command = piped + "ovms " + (isStream ? "stream" : "infer") + " --model " + sh(name) + given + " --rest --url " + location.host;
  return [["curl", curl], ["Python", lines.join("\n")], ["ovms", command]];
}

export function chatSnippets(name, messages, options, isKeyed) {
  const body = { model: name, messages, stream: true, ...options };
  const curl = "curl -N " + location.origin + "/v3/chat/completions \\\n" + keyLine(isKeyed) + "  -H 'content-type: application/json' \\\n  -d " + sh(JSON.stringify(body));
  const extra = Object.entries(options).map(([key, value]) => ", " + key + "=" + py(value)).join("");
  const python = ["from openai import OpenAI", "", "client = OpenAI(base_url=" + py(location.origin + "/v3") + ", api_key=" + (isKeyed ? "key" : "\"unused\"") + ")",
    "stream = client.chat.completions.create(", "    model=" + py(name) + ",", "    messages=" + py(messages) + ",", "    stream=True" + extra + ",", ")",
    "for chunk in stream:", "    print(chunk.choices[0].delta.content or \"\", end=\"\", flush=True)"].join("\n");
  return [["curl", curl], ["Python", python], ["ovms", "ovms chat " + sh(location.origin + "/v3") + " --model " + sh(name)]];
}

export function postSnippets(target, text, isKeyed) {
  const curl = "curl " + sh(location.origin + target) + " \\\n" + keyLine(isKeyed) + "  -H 'content-type: application/json' \\\n  -d " + sh(text);
  const python = ["import httpx", "", "answer = httpx.post(" + py(location.origin + target) + ", content=" + py(text) + (isKeyed ? ", headers={\"authorization\": \"Bearer \" + key}" : "") + ")", "print(answer.status_code, answer.text)"].join("\n");
  return [["curl", curl], ["Python", python]];
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    notice("Copied");
  } catch {
    notice("Copying is blocked by the browser; select the text", true);
  }
}

export function snippetsView(make) {
  const code = h("pre.answer", { tabindex: 0 });
  const tabs = h("span.segments", { role: "group", "aria-label": "Language" });
  let chosen = 0;
  const show = () => {
    let made;
    try { made = make(); } catch (error) { made = [["curl", error.message]]; }
    chosen = Math.min(chosen, made.length - 1);
    replace(code, made[chosen][1]);
    replace(tabs, made.map(([name], index) => h("button.small", {
      type: "button", "aria-pressed": String(index === chosen), onclick() { chosen = index; show(); },
    }, name)));
  };
  const element = h("details.snippets", { ontoggle() { if (element.open) show(); } }, h("summary", {}, "Call from the shell or Python"),
    h("div.bar", {}, tabs, h("button.small", { type: "button", onclick: () => copy(code.textContent) }, "Copy")), code);
  return { element, refresh() { if (element.open) show(); } };
}
