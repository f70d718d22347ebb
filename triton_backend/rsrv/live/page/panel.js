// A model's panel: its figures, its history, and actions for clients with the token.
import { $, bytes, make, order, percent, say, seconds } from "./base.js";
import { request } from "./request.js";
import { now, servers } from "./servers.js";

let shown = null; // the row whose panel is open

/** Return the text about the memory of a model's weights: its own tensors, and those that it shares with other models. */
function weights(row) {
  const memory = Object.values(servers.get(row.server)?.memory ?? {}).find((one) => row.name in one.models);
  if (!memory) return bytes(row.bytes);
  const groups = memory.groups.filter(([, names]) => names.includes(row.name));
  const shared = groups.reduce((sum, [size]) => sum + size, 0);
  const others = [...new Set(groups.flatMap(([, names]) => names))].filter((name) => name !== row.name);
  const own = `${bytes(memory.models[row.name])} own`;
  return shared ? `${own}, ${bytes(shared)} shared with ${others.slice(0, 5).join(", ")}${others.length > 5 ? ` and ${others.length - 5} more` : ""}` : own;
}

export async function openPanel(row, writable, log) {
  shown = row;
  $("panel").hidden = false;
  say($("panel-title"), row.name);
  $("panel").focus();
  $("actions").replaceChildren(...(writable && row.state !== "cold" ? ["pin", "unpin", "prefetch", "evict"].map((what) => action(what, row, log)) : []));
  const query = new URLSearchParams({ server: row.server, model: row.name });
  let details = {};
  try {
    const answer = await fetch(`live/model?${query}`);
    details = answer.ok ? await answer.json() : { history: [await answer.text()] };
  } catch (error) {
    details = { history: [String(error)] };
  }
  if (shown !== row) return;
  const facts = [["state", row.weights], ["weights", weights(row)], ...(details.facts ?? []), ...tensors("input", details.inputs), ...tensors("output", details.outputs), ...(row.error ? [["error", row.error]] : [])];
  $("panel-parts").replaceChildren(
    make("dl", { className: "facts" }, ...facts.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })])),
    ...latency(details.latency ?? []),
    ...table(["variant", "size", "executions", "cost"], details.executables ?? []),
    ...request(row, details, writable),
    ...part("Slowest requests of the last hour", details.slowest ?? []),
  );
  $("history-lines").replaceChildren(...(details.history ?? []).reverse().map((text) => make("li", { textContent: text })));
}

const part = (title, lines) => (lines.length ? [make("h3", { textContent: title }), make("ol", { className: "lines" }, ...lines.reverse().map((text) => make("li", { textContent: text })))] : []);

function table(titles, lines) {
  if (!lines.length) return [];
  const head = make("tr", {}, ...titles.map((text) => make("th", { className: "number", scope: "col", textContent: text })));
  const body = lines.map((line) => make("tr", {}, ...line.map((text) => make("td", { className: "number", textContent: text }))));
  return [make("h3", { textContent: "Compiled" }), make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))];
}

/** Return a chart of the durations of requests since the runtimes started, with a bar for each interval. */
function latency(pairs) {
  if (!pairs.length) return [];
  const total = pairs.reduce((sum, [, count]) => sum + count, 0), most = Math.max(...pairs.map(([, count]) => count));
  const body = pairs.map(([bound, count]) => {
    const bar = make("i");
    bar.style.width = `${(100 * count) / most}%`;
    return make("tr", {}, make("th", { scope: "row", textContent: bound == null ? "more" : `to ${seconds(bound)}` }), make("td", { className: "share" }, bar), make("td", { className: "number", textContent: String(count), title: percent(count / total) }));
  });
  return [make("h3", { textContent: `Latency of ${total} requests` }), make("table", { id: "latency" }, make("tbody", {}, ...body))];
}

const shaped = ({ datatype, shape }) => `${datatype} [${shape.map((size) => (Number(size) < 0 ? "any" : size)).join(", ")}]`;
const tensors = (kind, specs) => (specs ?? []).map((spec) => [kind, `${spec.name}: ${shaped(spec)}${spec.optional ? ", optional" : ""}`]);

export function beginPanel() {
  const close = () => {
    $("panel").hidden = true;
    shown?.element?.querySelector("button").focus();
    shown = null;
  };
  $("close").addEventListener("click", close);
  $("panel").addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
}

function action(what, row, log) {
  const button = make("button", { type: "button", textContent: what });
  button.addEventListener("click", async () => {
    const { ok, text } = await order("live/steer", JSON.stringify({ server: row.server, model: row.name, what }));
    const outcome = ok ? "done" : text;
    const server = servers.get(row.server);
    log({ t: server ? now(server) : Date.now() / 1000, server: row.server, text: `${what} ${row.name}: ${outcome}` });
  });
  return button;
}
