// Page frame: header, connection state, key dialog and view routing.

import { setKey } from "./api.js";
import { h, replace, setClass, setText } from "./dom.js";
import * as format from "./format.js";
import { listen, retry, state, want } from "./live.js";
import { activityView } from "./activity.js";
import { logView } from "./log.js";
import { serviceView } from "./service.js";
import { tracesView } from "./traces.js";
import { servicesView } from "./services.js";

const VIEWS = [
  ["services", "Services", (rest) => (rest.length && rest[0] ? serviceView(rest) : servicesView())],
  ["activity", "Activity", activityView],
  ["traces", "Traces", tracesView],
  ["log", "Log", logView],
];

const top = document.getElementById("top");
const main = document.getElementById("main");
let view = null;
let shown = "";

const link = h("span.link", { role: "status" });
const facts = {};
const nav = h("nav", { "aria-label": "Views" }, VIEWS.map(([key, title]) => h("a", { href: "#/" + key, id: "to-" + key }, title)));

function fact(key, title, text) {
  facts[key] = h("b", {}, "–");
  return h("span.fact", { title: text }, title + " ", facts[key]);
}

replace(top,
  h("div.brand", {}, h("img", { src: "/console/page/icon.svg", alt: "", width: 18, height: 18 }), h("span", { id: "server-name" }, "Console")),
  nav,
  h("a", { href: "/v2/docs", title: "API of the loaded services" }, "API"),
  h("div.facts", {},
    fact("rate", "req/s", "Completed requests per second"),
    fact("errors", "err/s", "Failed requests per second"),
    fact("p99", "p99", "99th percentile of the latency"),
    fact("memory", "mem", "Resident memory of the workers"),
    fact("cpu", "cpu", "CPU cores in use")),
  link);

function showLink() {
  const words = {
    connecting: "connecting", live: "live", lost: "reconnecting", unknown: "needs a key", refused: "refused",
  };
  let text = words[state.link] || state.link;
  let kind = state.link;
  if (state.link === "live" && state.totals) {
    text = state.totals.ready ? "ready" : "not ready";
    kind = state.totals.ready ? "live" : "unready";
    const silent = state.totals.silent || [];
    if (silent.length) text += ", " + silent.map((worker) => "worker " + worker + " is not responding").join(", ");
    link.title = state.totals.reason || "All configured services are ready";
  } else link.title = state.problem;
  link.className = "link " + kind;
  setText(link, text);
  setClass(document.body, "stale", state.link === "lost");
  if (state.link === "unknown" || state.link === "refused") askKey();
  else document.getElementById("key")?.remove();
}

function askKey() {
  if (document.getElementById("key")) return;
  const field = h("input", { type: "password", autocomplete: "off", required: true, id: "key-field" });
  const problem = h("p", { role: "status" }, state.problem);
  const dialog = h("dialog", { id: "key", "aria-labelledby": "key-title", oncancel: (event) => event.preventDefault() },
    h("form", {
      onsubmit(event) {
        event.preventDefault();
        const given = field.value.trim();
        // Other characters are invalid in a header and would make fetch fail.
        if (!/^[\x21-\x7e]*$/.test(given)) {
          setText(problem, "Keys consist of printable ASCII characters.");
          return;
        }
        setKey(given);
        dialog.close();
        dialog.remove();
        retry();
      },
    },
    h("h2", { id: "key-title" }, "Sign in"),
    problem,
    h("label", { for: "key-field" }, "API key or token with the scope read"), field,
    h("button.primary", { type: "submit" }, "Sign in")));
  document.body.append(dialog);
  dialog.showModal();
}

function showTotals() {
  const totals = state.totals;
  if (!totals) return;
  setText(facts.rate, format.rate(totals.rate));
  setText(facts.errors, format.rate(totals.error_rate));
  setClass(facts.errors, "bad", totals.error_rate > 0);
  setText(facts.p99, format.ms(totals.p99));
  setText(facts.memory, format.bytes(totals.memory_bytes));
  setText(facts.cpu, totals.cpu === null ? "–" : totals.cpu.toFixed(2));
  showLink();
}

function go() {
  const path = location.hash.replace(/^#\/?/, "") || "services";
  if (path === shown) return;
  shown = path;
  const [key, ...rest] = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  const found = VIEWS.find(([name]) => name === key) || VIEWS[0];
  for (const [name] of VIEWS) {
    const to = document.getElementById("to-" + name);
    if (name === found[0]) to.setAttribute("aria-current", "page");
    else to.removeAttribute("aria-current");
  }
  if (view && view.close) view.close();
  view = found[2](rest);
  want(view.wants || {});
  replace(main, view.element);
  document.title = (view.title || found[1]) + " · ovmstrio console";
  if (view.update) view.update("rows");
}

listen((what) => {
  if (what === "link") showLink();
  if (what === "server") setText(document.getElementById("server-name"), state.server.name);
  if (what === "figures") showTotals();
  if (view && view.update) view.update(what);
});
addEventListener("hashchange", () => { go(); main.focus({ preventScroll: true }); scrollTo(0, 0); });
showLink();
go();
