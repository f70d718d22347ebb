// The live page, which draws the server's stream of events. It uses no library, and fetches nothing from other sites.
import { $, clock, make, rate, say, seconds } from "./base.js";
import { drawAliases } from "./aliases.js";
import { beginCharts, drawCharts, takePoint } from "./charts.js";
import { drawDevices } from "./devices.js";
import { beginModels, drawModels } from "./models.js";
import { beginPanel, openPanel } from "./panel.js";
import { dropServer, known, now, outside, rows, servers, take, takeCold, takeSpans } from "./servers.js";

const MOST_LINES = 200; // of the log
const SILENCE = 4; // seconds that the next figures may be late before the page says that they are missing
const RETRY_MS = 2000;
const SEVERITIES = ["critical", "warning", "note"];
let writable = false;

const silence = (server) => (performance.now() - server.seen) / 1000;
const isSilent = (server) => silence(server) > SILENCE + (server.state.next_s ?? 1);

function drawTotals() {
  const answering = [...rows.values()].filter((row) => servers.get(row.server).state.up);
  const sum = (name) => answering.reduce((total, row) => total + (row[name] ?? 0), 0);
  const counts = new Map(), count = (word, more) => counts.set(word, (counts.get(word) ?? 0) + more);
  for (const row of answering) count(row.weights.split(",")[0], 1);
  for (const { state } of servers.values()) count(state?.asleep ? "asleep" : "cold", state?.cold ?? 0);
  const numbers = [...counts].filter(([, number]) => number).sort().map(([word, number]) => `${number} ${word}`);
  say($("total-models"), numbers.join(", ") || "none");
  say($("total-rate"), rate(sum("rate")));
  say($("total-queued"), String(sum("queued")));
  say($("total-loads"), rate(sum("loading")));
}

function drawFacts() {
  const describe = (server) => {
    const { facts } = server;
    const doors = Object.entries(facts.endpoints).map(([name, address]) => `${name} ${outside(address)}`);
    return [facts.name, `version ${facts.version}`, `up ${seconds(Math.max(0, now(server) - facts.started))}`, ...doors].join(" · ");
  };
  const reporting = [...servers.values()].filter((server) => server.facts && server.state);
  say($("facts"), reporting.length === 1 ? describe(reporting[0]) : reporting.length ? `${servers.size} servers` : "");
  $("facts").title = reporting.length > 1 ? reporting.map(describe).join("\n") : "";
}

/** Show the severest finding of all servers in the first line. When it is opened, it has all findings with causes and cures. */
function drawFindings() {
  const all = [...servers].flatMap(([server, { state }]) => (state?.findings ?? []).map((finding) => ({ ...finding, server })));
  all.sort((a, b) => SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity));
  const urgent = all.filter((finding) => finding.severity !== "note"), first = urgent.length ? urgent : all;
  const where = (finding) => (servers.size > 1 ? `${finding.server}: ` : "");
  const reporting = [...servers.values()].filter(({ state }) => state);
  const [down, silent] = [reporting.filter(({ state }) => !state.up).length, reporting.filter(isSilent).length];
  const count = (number, does, do_) => (servers.size < 2 ? `the server ${does}` : `${number} of ${servers.size} servers ${number > 1 ? do_ : does}`);
  const severity = down || silent ? "critical" : (urgent[0]?.severity ?? (reporting.length ? "none" : "unknown"));
  if ($("diagnosis").dataset.severity !== severity) $("diagnosis").dataset.severity = severity;
  say($("headline"), silent
    ? `critical: ${count(silent, "sends", "send")} no figures; this page shows the last ones`
    : down && urgent[0]?.severity !== "critical" ? `critical: ${count(down, "does", "do")} not answer`
    : first.length ? `${first[0].severity}: ${where(first[0])}${first[0].evidence}` + (first.length > 1 ? ` (and ${first.length - 1} more)` : "")
    : reporting.length ? "all is well" : "no server is known yet");
  // Screen readers report new findings, but not each new number.
  const spoken = [silent, down, first.length && where(first[0]) + first[0].name].join();
  if (drawFindings.spoken !== spoken) say($("spoken"), $("headline").textContent);
  drawFindings.spoken = spoken;
  // Do not replace details that have not changed, so that a selection in them stays.
  const content = JSON.stringify(all);
  if (drawFindings.content === content) return;
  drawFindings.content = content;
  $("findings").replaceChildren(...all.map((finding) => {
    const item = make("li", {}, `${finding.severity}: ${where(finding)}${finding.evidence}`, make("span", { textContent: `why: ${finding.cause}` }), make("span", { textContent: `do: ${finding.cure}` }));
    item.dataset.severity = finding.severity;
    return item;
  }));
}

/** Add a line. A full log drops its oldest line about a move of weights, or else its oldest line. */
function log({ t, server, text, moves }) {
  const item = make("li", {}, make("time", { textContent: clock(t) }), servers.size > 1 ? `${server}: ${text}` : text);
  Object.assign(item.dataset, { server, moves: String(Boolean(moves)) });
  $("log").prepend(item);
  if ($("log").children.length > MOST_LINES) ([...$("log").querySelectorAll("[data-moves=true]")].at(-1) ?? $("log").lastChild).remove();
}

function drawAll() {
  drawDevices();
  drawModels();
  drawAliases();
  drawTotals();
  drawFacts();
  drawFindings();
}

// --- the stream -----------------------------------------------------------------------------------------------

const handlers = new Map();
const on = (name, act) => handlers.set(name, (event) => {
  const { server, is, ...hello } = JSON.parse(event.data);
  act(server, is, hello);
});
const connection = (state, text) => {
  $("connection").dataset.state = state;
  say($("connection"), text);
};
function connect() {
  const source = new EventSource("live/stream");
  source.onopen = () => connection("live", "live");
  source.onerror = () => {
    connection("lost", "connection lost; retrying");
    // Try again here, because after an HTTP error, such as a proxy's, the browser does not do so.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
  };
  for (const [name, act] of handlers) source.addEventListener(name, act);
}
on("hello", (_, __, hello) => {
  writable = hello.writable;
  // Forget all servers, because one may have left while there was no connection.
  [...servers.keys()].forEach(dropServer);
});
on("begin", (server) => {
  // Remove the server's lines and spans, because its latest ones follow.
  for (const device of known(server).devices.values()) device.spans.length = 0;
  for (const item of [...$("log").children]) if (item.dataset.server === server) item.remove();
});
on("server", (server, is) => { known(server).facts = is; });
on("memory", (server, is) => { known(server).memory = is; });
on("cold", (server, is) => { takeCold(known(server), is); });
on("charts", (server, is) => { known(server).charts = is; drawCharts(); });
on("point", (server, is) => { takePoint(known(server), is); drawCharts(); });
on("log", (server, is) => log({ server, ...is }));
on("spans", (server, is) => takeSpans(server, is.spans));
on("state", (server, is) => { take(server, is); drawAll(); });
on("gone", (server) => { dropServer(server); drawAll(); drawCharts(); });

const frame = () => {
  for (const server of servers.values()) {
    const silent = server.state !== null && isSilent(server);
    if (server.silent !== silent) {
      server.silent = silent;
      drawFindings();
    }
    for (const { card } of server.devices.values()) {
      if (!card) continue;
      card.timeline.draw();
      if (silent) {
        card.root.dataset.up = "false";
        say(card.facts, `no figures for ${Math.round(silence(server))} s`);
      }
    }
  }
  setTimeout(() => requestAnimationFrame(frame), 100);
};
beginCharts();
beginModels((row) => openPanel(row, writable, log));
beginPanel();
connect();
frame();
